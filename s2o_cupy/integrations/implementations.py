"""Attention implementations of transformers that a tool lends to a model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["lent"]


@contextmanager
def lent(model: Any, name: str) -> Iterator[None]:
    """The attention of that name in all parts of a model, and then what each had."""
    config = model.config
    before = {"": config._attn_implementation}
    for part in config.sub_configs:
        if getattr(config, part, None) is not None:
            before[part] = getattr(config, part)._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
