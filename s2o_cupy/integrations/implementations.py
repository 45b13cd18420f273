"""Attention implementations of transformers that a tool lends to a model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["lent"]


@contextmanager
def lent(model: Any, name: str) -> Iterator[None]:
    """The attention of that name in all parts of a model, and then what each had."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, its_own in before:
            config._attn_implementation_internal = its_own  # the attribute without "internal" sets parts too


def _configs(model: Any) -> list[Any]:
    """Of a model and its parts, and those in them: a part may have a copy that no other config knows."""
    left: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    left = [config for config in left if isinstance(config, PreTrainedConfig)]
    found = {}  # by id, as configs have no hash
    while left:
        config = left.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            left += [part for part in parts if part is not None]
    return list(found.values())
