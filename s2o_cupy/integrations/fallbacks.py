"""Which calls of a model S2O took, and why it left others to the ordinary attention: counted, and said once."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = ["REASONS", "WORDS", "CallCounts", "Kinds"]

# What each reason means. Of those first nobody is warned: the model's own attention is meant to take such calls.
_EXPECTED = {
    "decoding": "one query",
    "short": "fewer keys than min_seqlen",
    "few queries": "fewer queries than block_m",
    "layer": "per_layer says None for the layer",
    "not causal": "attention of the layer is not causal",
    "dropout": "dropout, as in training",
}
_UNEXPECTED = {
    "mask": "a mask of the caller's own, or one that transformers made within torch.compile; S2O takes calls without "
    "a mask, and padding and windows when the mask function runs outside of the graph",
    "mask function": "the model lets queries see other keys than the causal ones, such as those of an image",
    "chunked attention": "attention in chunks, as of Llama 4, beyond the first chunk",
    "scattered padding": "padding between the tokens of a row; S2O takes padding at its ends",
    "sliding window": "a sliding window that no mask of the call says, or of one key",
    "position bias": "a bias is added to the scores",
    "paged cache": "keys and values lie in transformers' paged cache; see s2o_cupy.s2o_attention_paged",
    "shape": "head_dim above 256, values of another head_dim, or keys of another batch",
    "device or dtype": "S2O takes float16 and bfloat16 on an NVIDIA GPU, and float32 and float64 too on the CPU",
    "gradients": "gradients are enabled; call the model under torch.no_grad() or torch.inference_mode()",
}
REASONS = _EXPECTED | _UNEXPECTED


@dataclass(frozen=True)
class Kinds:
    """What the calls that are counted can be."""

    log: str  # name of the logger
    attention: str  # what takes the calls that S2O does not
    expected: dict[str, str]  # reasons, and what they mean: nobody is warned
    unexpected: dict[str, str]
    taken: dict[str, str]  # kinds of calls that are S2O's


OF_MODELS = Kinds(
    "s2o_cupy.integrations.transformers", "the model's own attention", _EXPECTED, _UNEXPECTED,
    {
        "s2o": "S2O", "method": "the method that register was given, in S2O's place",
        "dense window": "S2O's dense kernels, exactly, in a sliding window",
    },
)  # fmt: skip
WORDS = OF_MODELS.expected | OF_MODELS.unexpected | OF_MODELS.taken


class CallCounts:
    """How often what ran. Counts inside of compiled graphs too, each time that the graph runs.

    A CUDA graph's replay runs no Python, and is not counted.
    """

    def __init__(self, kinds: Kinds = OF_MODELS) -> None:
        self.kinds = kinds
        self.calls: Counter[str] = Counter()
        self._number = next(_numbers)
        _by_number[self._number] = self

    def add(self, what: str) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch.ops.s2o_cupy.count_call.default(self._number, what)
        elif not torch.compiler.is_compiling():  # an exported program runs without this process
            self.add_now(what)

    def add_now(self, what: str, times: int = 1) -> None:
        first = what not in self.calls
        self.calls[what] += times
        if first and what not in self.kinds.taken:
            unexpected = what in self.kinds.unexpected
            logging.getLogger(self.kinds.log).log(
                logging.WARNING if unexpected else logging.INFO,
                "s2o: %s takes calls of the kind %r: %s. This is said once; report() has the counts.",
                self.kinds.attention,
                what,
                (self.kinds.unexpected if unexpected else self.kinds.expected)[what],
            )

    def report(self) -> str:
        """A line for each kind of call, the most frequent first: how many, of which kind, and what that means."""
        if not self.calls:
            return "no calls"
        width = max(map(len, self.calls))
        words = self.kinds.expected | self.kinds.unexpected | self.kinds.taken
        return "\n".join(f"{count:8,}  {what:{width}}  {words[what]}" for what, count in self.calls.most_common())


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, CallCounts] = WeakValueDictionary()


def _count(number: int, what: str) -> None:
    counts = _by_number.get(number)
    if counts is not None:
        counts.add_now(what)


def _nothing(*_: Any) -> None:
    """What a graph in the making counts."""


_library = torch.library.Library("s2o_cupy", "FRAGMENT")
_library.define("count_call(int number, str what) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("count_call", _count, "CompositeExplicitAutograd")
torch.library.register_fake("s2o_cupy::count_call", _nothing, lib=_library)
torch.fx.node.has_side_effect(torch.ops.s2o_cupy.count_call.default)  # it has no result that anything reads
