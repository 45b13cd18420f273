"""Which calls of a model S2O took, and why it left others to the ordinary attention: counted, and said once."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..problem import BACKEND_DTYPES
from .autocast import autocast_dtype

__all__ = ["BY_S2O", "OF_MODELS", "REASONS", "WORDS", "CallCounts", "Kinds", "why_not_tensors"]

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
    "gradients": "gradients are enabled, or the model is in train(); call it after eval(), under torch.no_grad() or "
    "torch.inference_mode()",
}
REASONS = _EXPECTED | _UNEXPECTED


@dataclass(frozen=True)
class Kinds:
    """What the calls that are counted can be."""

    log: str  # name of the logger
    attention: str  # what takes the calls that S2O does not
    expected: dict[str, str]  # reasons, and what they mean: nobody is warned
    unexpected: dict[str, str]  # a warning, once
    taken: dict[str, str]  # kinds of calls that are S2O's
    until_taken: frozenset[str] = frozenset()  # of the expected: a warning if S2O has not run before
    nothing: str = "no calls"  # what a report says without any


OF_MODELS = Kinds(
    "s2o_cupy.integrations.transformers", "the model's own attention", _EXPECTED, _UNEXPECTED,
    {
        "s2o": "S2O", "method": "the method that register was given, in S2O's place",
        "dense": "S2O's dense kernels, exactly: tau is 0, or a call has no more keys than dense_up_to",
        "partly dense": "S2O for some heads; of the others nothing is left out, as their tau is 0 or their call has no "
        "more keys than dense_up_to",
        "dense window": "S2O's dense kernels, exactly, in a sliding window",
    },
    frozenset({"short", "few queries", "not causal"}),
    "no calls: no model has run with this attention yet (attn_implementation=, or model.set_attn_implementation)",
)  # fmt: skip
BY_S2O = ("s2o", "partly dense", "dense")  # of models' calls, those without a window
WORDS = OF_MODELS.expected | OF_MODELS.unexpected | OF_MODELS.taken


def why_not_tensors(query: Any, key: Any, value: Any, dropout: float) -> str | None:
    """Of a call whose shapes and mask S2O takes, one of REASONS, or None."""
    backend = {"cpu": "numpy", "cuda": "cupy"}.get(query.device.type, "")
    dtypes = [str(autocast_dtype(x)).removeprefix("torch.") for x in (query, key, value)]
    if not dtypes[0] == dtypes[1] == dtypes[2] or dtypes[0] not in BACKEND_DTYPES.get(backend, ()):
        return "device or dtype"
    if dropout > 0:
        return "dropout"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients"
    return None


class CallCounts:
    """How often what ran. Counts inside of compiled graphs too, each time that the graph runs.

    A CUDA graph's replay runs no Python, and is not counted.
    """

    def __init__(self, kinds: Kinds = OF_MODELS) -> None:
        self.kinds = kinds
        self.calls: Counter[str] = Counter()
        self._layers: defaultdict[str, set[int]] = defaultdict(set)  # that each kind of call met
        self._number = next(_numbers)
        _by_number[self._number] = self

    def add(self, what: str, layer: int = -1) -> None:
        """One call, of a ``layer`` counted from 0, or of -1, which nobody names."""
        if torch.compiler.is_dynamo_compiling():
            torch.ops.s2o_cupy.count_call.default(self._number, what, layer)
        elif not torch.compiler.is_compiling():  # an exported program runs without this process
            self.add_now(what, layer=layer)

    def add_now(self, what: str, times: int = 1, layer: int = -1) -> None:
        first, ran = what not in self.calls, any(self.calls[x] for x in self.kinds.taken)
        self.calls[what] += times
        if layer >= 0:
            self._layers[what].add(layer)
        if first and what not in self.kinds.taken:
            unexpected = what in self.kinds.unexpected
            never = not ran and what in self.kinds.until_taken
            logging.getLogger(self.kinds.log).log(
                logging.WARNING if unexpected or never else logging.INFO,
                "s2o: %s takes calls of the kind %r: %s.%s This is said once; report() has the counts.",
                self.kinds.attention,
                what,
                (self.kinds.unexpected if unexpected else self.kinds.expected)[what],
                " S2O has not run so far." if never else "",
            )

    def report(self) -> str:
        """A line for each kind of call, the most frequent first: how many, of which kind, in which layers where they
        are known, and what that means; and a line if S2O took none."""
        if not self.calls:
            return self.kinds.nothing
        words = self.kinds.expected | self.kinds.unexpected | self.kinds.taken
        rows = [("calls", "kind", "layers", "meaning")]
        rows += [(f"{n:,}", what, _spans(self._layers[what]), words[what]) for what, n in self.calls.most_common()]
        shown = [0, 1, 2, 3] if any(self._layers.values()) else [0, 1, 3]
        width = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join((row[0].rjust(width[0]), *(row[i].ljust(width[i]) for i in shown[1:]))) for row in rows]
        if not any(self.calls[x] for x in self.kinds.taken):
            lines.append(f"S2O took no call: {self.kinds.attention} took them all.")
        return "\n".join(line.rstrip() for line in lines)


def _spans(layers: Iterable[int]) -> str:
    """"0-3, 5" of 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for layer in sorted(layers):
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, CallCounts] = WeakValueDictionary()


def _count(number: int, what: str, layer: int = -1) -> None:
    counts = _by_number.get(number)
    if counts is not None:
        counts.add_now(what, layer=layer)


def _nothing(*_: Any) -> None:
    """What a graph in the making counts."""


_library = torch.library.Library("s2o_cupy", "FRAGMENT")
_library.define("count_call(int number, str what, int layer=-1) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("count_call", _count, "CompositeExplicitAutograd")
torch.library.register_fake("s2o_cupy::count_call", _nothing, lib=_library)
torch.fx.node.has_side_effect(torch.ops.s2o_cupy.count_call.default)  # it has no result that anything reads
