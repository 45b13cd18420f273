"""BLASST's rule (arXiv 2512.12087), skip-softmax in servers: blocks whose scores are far below the running maximum.

A callable in array code, as a method of one's own is: it has no kernels but those of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentTypeError, ArgumentValueError
from ..schedules.schedule import Schedule
from ..spec import checked_int, names_its_fields
from .base import BLOCKS, checked_choice, checked_number

__all__ = ["BLASSTConfig"]


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class BLASSTConfig:
    """Blocks of keys in their order, without those whose largest score is far below the largest so far.

    A row of a q tile would leave out a block where the block's largest score is below the largest score of the blocks
    up to it, itself among them, by more than -ln(threshold). The tile leaves it out where all of its rows would.

    Parameters
    ----------
    threshold : float, optional
        lambda, from 0 to 1. What a left-out key would weigh is below this share of the largest weight so far. At 0
        nothing is left out. This or ``scale_factor`` must be given.
    scale_factor : float, optional
        In place of the threshold, as servers take it: the threshold is this over the number of keys, up to 1. vLLM's
        example has 1000 for prefill.
    block : 64 or 128, default 128
        Keys of a block.
    block_m : 64 or 128, default 128
        Queries of a q tile. The Hopper kernels take 64 up to head_dim 128.
    workspace_bytes : int, default 256 MiB
        Bound on the memory of scores; those of one q tile of one head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.

    Notes
    -----
    Scores are computed here first, exactly and in float32, and again in attention to what is left. So the time is not
    that of the authors' fused kernel, which computes them once and saves the softmax and the product with the values:
    density and error are those of the rule, and time is more than dense attention's.

    Settled here: a causal q tile attends densely to the keys from its own block on, as of these each row sees others.
    Blocks go from the first key to the last, and all rows of a q tile must agree; kernels that go backwards, or let
    fewer rows decide, leave out other ones. A block with a score that is NaN is attended to, and so is every block
    after it.
    """

    threshold: float | None = None
    scale_factor: float | None = None
    block: int = 128
    block_m: int = 128
    workspace_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.scale_factor is None):
            came = "neither threshold nor scale_factor is given" if self.threshold is None else "both are given"
            raise ArgumentTypeError(f"{came}; accepted: threshold or scale_factor")
        for name, most, accepted in (("threshold", 1, "a number from 0 to 1"), ("scale_factor", math.inf, "0 or more")):
            given = getattr(self, name)
            if given is not None and checked_number(name, given, -math.inf, most, accepted) < 0:
                raise ArgumentValueError(f"{name} is {given!r}; accepted: {accepted}")
        for name in ("block", "block_m"):
            checked_choice(name, getattr(self, name), BLOCKS)
        checked_int("workspace_bytes", self.workspace_bytes, 1 << 20)

    def threshold_of(self, seqlen_k: int) -> float:
        """Of a call with so many keys."""
        if self.threshold is not None:
            return float(self.threshold)
        assert self.scale_factor is not None
        return min(1.0, self.scale_factor / max(1, seqlen_k))

    def __call__(self, q: Any, k: Any, *, is_causal: bool, scale: float) -> Schedule:
        """Of q [batch, heads, seqlen_q, head_dim] and k [batch, kv_heads, seqlen_k, head_dim]."""
        from array_api_compat import array_namespace

        xp = array_namespace(q)
        batch, heads, seqlen_q, _ = q.shape
        group, seqlen_k = heads // k.shape[1], k.shape[2]
        segment = max(self.block, self.block_m)
        # As the dense part must begin with a block.
        window = (seqlen_k - seqlen_q) % self.block if is_causal else 0
        dense_from = seqlen_k - seqlen_q - window if is_causal else seqlen_k  # of a causal call's first segment
        masks = [
            self._kept(xp, q[b, h], k[b, h // group], dense_from, segment if is_causal else 0, scale)
            for b in range(batch)
            for h in range(heads)
        ]
        mask = xp.reshape(xp.stack(masks), (batch, heads, *masks[0].shape))
        rules = {"segment": segment, "window": window} if is_causal else {}
        return Schedule.from_block_mask(
            mask, self.block, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=self.block_m, is_causal=is_causal, **rules
        )

    def _kept(self, xp: Any, q: Any, k: Any, dense_from: int, segment: int, scale: float) -> Any:
        """Blocks that each q tile of a head attends to, bool [tiles, blocks]; of those in its dense part anything.

        Before the dense part a query sees whole blocks alone, and the running maximum there asks for nothing after
        them: no mask is needed."""
        seqlen_q, seqlen_k = q.shape[0], k.shape[0]
        blocks = -(-seqlen_k // self.block)
        kind = xp.float64 if q.dtype == xp.float64 else xp.float32
        keys = xp.permute_dims(xp.astype(k, kind), (1, 0))
        of_tile = self.block_m * blocks * self.block * (8 if kind == xp.float64 else 4)
        tiles = max(1, self.workspace_bytes // of_tile)
        found = []
        for first in range(0, seqlen_q, tiles * self.block_m):
            rows = xp.astype(q[first : first + tiles * self.block_m], kind) * scale
            last = first + rows.shape[0] - 1
            end = dense_from + last // segment * segment if segment else seqlen_k
            kept = self._kept_rows(xp, rows @ keys[:, :end], self.threshold_of(seqlen_k))  # [rows, blocks before end]
            kept = _padded(xp, _padded(xp, kept, 1, blocks, False), 0, -(-rows.shape[0] // self.block_m) * self.block_m,
                           False)  # fmt: skip
            found.append(xp.any(xp.reshape(kept, (-1, self.block_m, blocks)), axis=1))
        return xp.concat(found)

    def _kept_rows(self, xp: Any, scores: Any, threshold: float) -> Any:
        """Which blocks each row would attend to, bool [rows, blocks], from its scores [rows, keys]."""
        rows, keys = scores.shape
        blocks = -(-keys // self.block)
        if not blocks:
            return xp.astype(scores, xp.bool)
        scores = _padded(xp, scores, 1, blocks * self.block, -math.inf)
        largest = xp.max(xp.reshape(scores, (rows, blocks, self.block)), axis=2)
        running, step = largest, 1
        while step < blocks:  # the maximum of twice as many blocks each time
            running = xp.concat((running[:, :step], xp.maximum(running[:, step:], running[:, :-step])), axis=1)
            step *= 2
        far = math.log(threshold) if threshold else -math.inf
        return ~(largest - running < far)  # a NaN is no reason to leave anything out


def _padded(xp: Any, x: Any, axis: int, length: int, value: Any) -> Any:
    """``x`` with so many elements on an axis."""
    from array_api_compat import device

    missing = length - x.shape[axis]
    if not missing:
        return x
    shape = tuple(missing if i == axis else n for i, n in enumerate(x.shape))
    return xp.concat((x, xp.full(shape, value, dtype=x.dtype, device=device(x))), axis=axis)
