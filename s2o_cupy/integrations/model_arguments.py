"""Arguments that several functions of models take, checked before a model runs."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from ..methods.own import config_named

__all__ = ["check_is_no_method", "check_min_seqlen", "parse_ids", "vocabulary_of"]

Tensor = Any  # torch.Tensor


def vocabulary_of(function: str, model: Any) -> int | None:
    """The number of ids that a model of transformers knows, None where it does not say; TypeError if it is none."""
    if not callable(getattr(getattr(model, "config", None), "get_text_config", None)):
        raise TypeError(f"{function}: model is a {type(model).__name__}; accepted: a model of transformers, loaded")
    return getattr(model.config.get_text_config(), "vocab_size", None)


def parse_ids(function: str, vocabulary: int | None, ids: Any, name: str = "input_ids") -> Tensor:
    """The argument ``name`` of ``function`` as int64 [batch, seqlen], as losses need them; TypeError or ValueError says
    what came and what is accepted."""
    accepted = "a PyTorch tensor (batch, seqlen) of int32 or int64, with at least 1 row and 2 tokens"
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{function}: {name} is a {type(ids).__name__}; accepted: {accepted}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} is of {str(ids.dtype).removeprefix('torch.')}; accepted: {accepted}")
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"{function}: {name} has shape {tuple(ids.shape)}; accepted: {accepted}")
    if vocabulary is not None and (wrong := [x for x in map(int, ids.aminmax()) if not 0 <= x < vocabulary]):
        raise ValueError(
            f"{function}: {name} has the id {wrong[0]}; accepted: 0 to {vocabulary - 1}, the model's vocabulary"
        )
    return ids.long()


def check_is_no_method(function: str, name: str, takes_methods: bool) -> None:
    """Whether the ``name`` that one gives S2O is not that of another method. ``takes_methods``: whether that could be
    the config."""
    named = config_named(name, s2o=False, exactly=True)
    if named is not None:
        beside = f"config={named} with it, or " if takes_methods else ""
        raise ValueError(
            f"{function}: name is {name!r}, a method, but S2O would run; accepted: {beside}another name for S2O"
        )


def check_min_seqlen(function: str, min_seqlen: Any) -> None:
    if isinstance(min_seqlen, bool) or not isinstance(min_seqlen, numbers.Integral) or min_seqlen < 0:
        raise ValueError(f"{function}: min_seqlen is {min_seqlen!r}; accepted: an integer >= 0")
