"""Texts that a model is tuned on, and what the predictions of each are of."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..tools.must_hold import Row
from .model_arguments import parse_ids
from .next_tokens import predicted

__all__ = ["Text", "check_held_back", "parse_texts"]

Tensor = Any  # torch.Tensor
MOST_HELD_BACK = 0.5


@dataclass(eq=False)
class Text:
    """One or several sequences of one length, which go through the model together."""

    ids: Tensor  # int64 [batch, seqlen]
    answers: Tensor | None = None  # bool, the same
    inputs: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's forward
    hidden: Tensor = None  # the last hidden states with dense attention, once they are known

    @property
    def mask(self) -> Tensor | None:
        return self.inputs.get("attention_mask")

    @property
    def rows(self) -> list[Row]:
        on_host = [None if x is None else x.cpu().numpy() for x in (self.answers, self.mask)]
        answers, there = (len(self.ids) * [None] if x is None else list(x.astype(bool)) for x in on_host)
        return [Row(*row) for row in zip(self.ids.cpu().numpy(), answers, there, strict=True)]

    def of_predictions(self, values: np.ndarray) -> np.ndarray:
        """Those of [batch, seqlen - 1] neither of padding nor after it, row behind row, as `must_hold.cut` has them."""
        if self.mask is None:
            return values.ravel()
        return values[predicted(self.mask)]


def parse_texts(
    function: str, vocabulary: int | None, input_ids: Any, answers: Any, inputs: dict[str, Any]
) -> list[Text]:
    """``input_ids`` and ``answers`` of ``function``: a tensor, or several in a list; TypeError or ValueError says what
    came and what is accepted."""
    if isinstance(input_ids, Sequence) and not len(input_ids):
        raise ValueError(f"{function}: input_ids is empty; accepted: a PyTorch tensor, or several in a list")
    if isinstance(input_ids, str) or not isinstance(input_ids, Sequence):
        ids = parse_ids(function, vocabulary, input_ids)
        _check_mask(function, inputs.get("attention_mask"), ids)
        return [Text(ids, _answers(function, "answers", answers, ids), inputs)]
    tensors = [name for name, x in inputs.items() if isinstance(x, torch.Tensor)]
    if tensors and len(input_ids) > 1:
        raise ValueError(f"{function}: {tensors[0]} came with {len(input_ids)} texts; accepted: with one tensor of ids")
    if answers is not None and (not isinstance(answers, Sequence) or len(answers) != len(input_ids)):
        came = f"{len(answers)} masks" if isinstance(answers, Sequence) else f"a {type(answers).__name__}"
        raise ValueError(f"{function}: answers is {came} with {len(input_ids)} texts; accepted: a mask or None of each")
    texts = []
    for n, one in enumerate(input_ids):
        ids = parse_ids(function, vocabulary, one, f"input_ids[{n}]")
        _check_mask(function, inputs.get("attention_mask"), ids)
        given = None if answers is None else _answers(function, f"answers[{n}]", answers[n], ids)
        texts.append(Text(ids, given, dict(inputs)))
    return texts


def _check_mask(function: str, mask: Any, ids: Tensor) -> None:
    """A row of which no token is predicted says nothing of a setting."""
    if mask is None:
        return
    accepted = f"a PyTorch tensor {tuple(ids.shape)}, 0 for padding, with two neighbouring tokens at least in each row"
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{function}: attention_mask is a {type(mask).__name__}; accepted: {accepted}")
    if mask.shape != ids.shape:
        raise ValueError(f"{function}: attention_mask has shape {tuple(mask.shape)}; accepted: {accepted}")
    without = np.flatnonzero(~predicted(mask).any(axis=1)).tolist()
    if without:
        raise ValueError(
            f"{function}: attention_mask leaves nothing to predict in row {without[0]}; accepted: {accepted}"
        )


def _answers(function: str, name: str, given: Any, ids: Tensor) -> Tensor | None:
    if given is None:
        return None
    accepted = f"a PyTorch tensor {tuple(ids.shape)} of bool, with a token behind the first marked, or None"
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{function}: {name} is a {type(given).__name__}; accepted: {accepted}")
    if given.dtype != torch.bool:
        raise TypeError(f"{function}: {name} is of {str(given.dtype).removeprefix('torch.')}; accepted: {accepted}")
    if given.shape != ids.shape:
        raise ValueError(f"{function}: {name} has shape {tuple(given.shape)}; accepted: {accepted}")
    if not given[:, 1:].any():
        raise ValueError(f"{function}: {name} marks no token that is predicted; accepted: {accepted}")
    return given


def check_held_back(function: str, held_back: Any) -> float:
    accepted = f"a number from 0 to {MOST_HELD_BACK:g}"
    if isinstance(held_back, bool) or not isinstance(held_back, numbers.Real):
        raise TypeError(f"{function}: held_back is {held_back!r} ({type(held_back).__name__}); accepted: {accepted}")
    if not 0 <= float(held_back) <= MOST_HELD_BACK:
        raise ValueError(f"{function}: held_back is {held_back}; accepted: {accepted}")
    return float(held_back)
