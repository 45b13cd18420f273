"""From an NSA problem to what is launched: rounds of tokens, launches of compressed attention, the workspace.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..caches import remembered
from ..errors import ArgumentValueError
from ..plan.build import Array, Workspace, lay_out
from ..plan.device import DeviceLimits
from ..plan.kernels import Inputs, Kernel, Path, padded_head_dim
from ..plan.paths import device_path
from ..problem import Problem
from . import kernels
from .config import NSAConfig
from .kernels import COMPRESSED_KEYS, ITEM_ROWS

__all__ = [
    "NsaPlan", "Remainders", "check", "compressed_count", "inverted", "make_plan", "remainders", "round_tokens",
]  # fmt: skip

ROUND_UNIT = 512  # tokens that a round has a multiple of, if it has as many


def compressed_count(seqlen_k: int, length: int, stride: int) -> int:
    """How many compressed keys there are."""
    return max(0, (seqlen_k - length) // stride + 1)


class Remainders(NamedTuple):
    """Queries i with ``first`` <= i % stride < ``first + size``.

    Of each remainder the rows behind the first ``skipped`` see compressed keys, each one more than the one before: they
    are ``rows`` queries of plain causal attention to the first ``keys`` of them.
    """

    first: int
    size: int
    rows: int
    skipped: int
    keys: int


def remainders(seqlen_q: int, seqlen_k: int, length: int, stride: int) -> tuple[Remainders, ...]:
    """All remainders in order, neighbours of equal lengths together: up to three."""
    found: list[Remainders] = []
    for first in range(min(stride, seqlen_q)):
        rows = -(-(seqlen_q - first) // stride)
        seen = (first + seqlen_k - seqlen_q - length + 1) // stride + 1  # by the first of them; below 1: by none
        skipped = min(rows, max(0, 1 - seen))
        keys = seen + rows - 1 if rows > skipped else 0
        of = Remainders(first, 1, rows - skipped, skipped, keys)
        if found and found[-1][2:] == of[2:]:
            found[-1] = found[-1]._replace(size=found[-1].size + 1)
        else:
            found.append(of)
    assert len(found) <= 3
    return tuple(found)


@dataclass(frozen=True, eq=False)  # one object for all calls of one kind, which is what caches know it by
class NsaPlan:
    """One call, or a part of one."""

    problem: Problem
    config: NSAConfig
    inputs: Inputs
    group: int
    slots: int  # of a token: blocks whose parts are computed by blocks of keys
    apart: bool  # the last blocks of a token are computed with its window, and take no slot
    tokens: int  # of a round of attention to blocks
    remainders: tuple[Remainders, ...]
    workspace: Workspace
    kernels: tuple[Kernel, ...] = ()  # that are launched, but for pass 1
    choice_tokens: int = 0  # of a round of choosing them, which has its memory before
    fused: bool = False  # compressed attention leaves weights of blocks, of each head and relative to step_bases
    tops: bool = False  # of each quarter of a step of compressed keys the largest weight is known
    item_rows: int = ITEM_ROWS  # (token, head) pairs of some tokens of one block, at most

    def kernel(self, role: str) -> Kernel:
        return next(x for x in self.kernels if x.role == role)

    @property
    def kv_rows(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def blocks(self) -> int:
        """Of keys."""
        return -(-self.problem.seqlen_k // self.config.block)

    @property
    def compressed(self) -> int:
        return compressed_count(self.problem.seqlen_k, self.config.length, self.config.stride)

    @property
    def choice_rounds(self) -> tuple[tuple[int, int], ...]:
        """First token and tokens of each."""
        return _rounds(self.problem.seqlen_q, self.choice_tokens)

    @property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        return _rounds(self.problem.seqlen_q, self.tokens)

    @property
    def item_tokens(self) -> int:
        """Tokens of a block of nsa_selected, or of its backward."""
        return max(1, self.item_rows // self.group)

    @property
    def most_items(self) -> int:
        """Such blocks of a KV row: every block of keys may have a last one that is not full."""
        return self.tokens * self.slots // self.item_tokens + min(self.blocks, self.tokens * self.slots)

    @property
    def chunks(self) -> int:
        """Of tokens, of the counting sort."""
        return -(-self.tokens // kernels.CHUNK_TOKENS)

    @property
    def weight_stride(self) -> int:
        """Weights of a token: what a step of compressed keys counts for, 32 blocks at most, is written whole."""
        return (self.blocks // 32 + 1) * 32

    @property
    def weight_rows(self) -> int:
        """Of a token of a KV row."""
        return self.group if self.fused else 1

    @property
    def step_stride(self) -> int:
        """Steps of compressed keys."""
        return self.compressed // COMPRESSED_KEYS + 2

    @property
    def window_tiles(self) -> int:
        """Of a head: they begin at multiples of their rows."""
        rows = kernels.window_rows(self.kernel("nsa_window"))
        first = self.problem.seqlen_k - self.problem.seqlen_q
        return (self.problem.seqlen_k - 1) // rows - first // rows + 1

    @property
    def lse_rows(self) -> tuple[int, ...]:
        """Where in a sequence's lse of compressed attention each of the remainders begins, and how many there are."""
        ends = [0]
        for x in self.remainders:
            ends.append(ends[-1] + x.size * self.problem.heads * x.rows)
        return tuple(ends)


def _rounds(end: int, tokens: int) -> tuple[tuple[int, int], ...]:
    return tuple((first, min(tokens, end - first)) for first in range(0, end, tokens)) if tokens else ()


@remembered
def make_plan(
    problem: Problem, config: NSAConfig, limits: DeviceLimits, *, where: str, compresses: bool, attends: bool,
    gates: bool, shares: bool = True,
) -> NsaPlan:  # fmt: skip
    """``compresses``: blocks are chosen by compressed attention. ``attends``: to the chosen blocks. ``gates``: also to
    the window, whose keys and values are those of the blocks where it ``shares`` them. ``where``: the function's name,
    for errors.

    Raises ValueError for what no kernel takes.
    """
    group = problem.heads // max(1, problem.kv_heads)
    check(problem, config, group, where, compresses)
    inputs = Inputs(problem.dtype, padded_head_dim(problem.head_dim))
    path = device_path(limits, config.path)
    fused = compresses and path.has_wgmma and group <= kernels.FUSED_GROUP
    runs = remainders(problem.seqlen_q, problem.seqlen_k, config.length, config.stride)
    apart = gates and shares and config.window >= config.local * config.block
    plan = NsaPlan(
        problem, config, inputs, group, config.top - config.local * apart, apart, 0,
        () if fused or not compresses else runs, Workspace({}, 0, 0), fused=fused,
    )  # fmt: skip
    launched = _kernels(plan, path, compresses, attends, gates)
    most = max(kernel.shared_bytes for kernel in launched)
    if most > limits.shared_per_block:
        raise ArgumentValueError(
            f"{group} query heads of a KV head, or {plan.blocks} blocks of keys, need {most} bytes of shared "
            f"memory, and the GPU has {limits.shared_per_block}; accepted: fewer, or larger blocks",
            where,
        )
    plan = replace(plan, kernels=launched, tops=any(x.family in kernels.LEAVE_TOPS for x in launched))
    weights, parts = _bytes_each(plan)
    plan = replace(
        plan, tokens=round_tokens(plan, parts) if attends else 0,
        choice_tokens=round_tokens(plan, weights) if compresses else 0,
    )  # fmt: skip
    return replace(plan, workspace=_workspace(plan, compresses, attends))


def _kernels(plan: NsaPlan, path: Path, compresses: bool, attends: bool, gates: bool) -> tuple[Kernel, ...]:
    found: list[Kernel] = []
    if gates or not (compresses or attends):
        found.append(kernels.window(plan.inputs, path))
    if compresses:
        if plan.fused:
            found.append(kernels.compressed(plan.inputs))
        else:
            found.append(kernels.block_weights(plan.inputs, plan.group, path))
        found.append(kernels.top_blocks())
    if attends and plan.slots:
        found += [kernels.count(plan.blocks), kernels.totals(), kernels.places(), kernels.scatter(plan.blocks)]
        found.append(kernels.selected(plan.inputs, plan.config.block, path))
    if attends:
        found.append(kernels.merge_parts(plan.inputs))
    return tuple(found)


def round_tokens(plan: NsaPlan, bytes_each: int) -> int:
    """Tokens of a round, of ``bytes_each`` in the workspace."""
    fits = max(kernels.ROWS, plan.config.workspace_bytes // max(1, bytes_each))
    if fits >= plan.problem.seqlen_q:
        return max(1, plan.problem.seqlen_q)
    if fits > ROUND_UNIT:
        turns = -(-plan.problem.seqlen_q // (fits // ROUND_UNIT * ROUND_UNIT))  # equal ones
        fits = -(-plan.problem.seqlen_q // turns)
        fits = -(-fits // ROUND_UNIT) * ROUND_UNIT
    return fits


def _bytes_each(plan: NsaPlan) -> tuple[int, int]:
    """Of a token: weights of blocks, and parts."""
    rows = plan.problem.batch * plan.problem.heads * plan.slots
    of_row = plan.weight_stride + (4 * plan.tops + plan.fused) * plan.step_stride + plan.fused
    return 4 * plan.kv_rows * plan.weight_rows * of_row, rows * (2 * plan.inputs.head_dim + 4)


def _workspace(plan: NsaPlan, compresses: bool, attends: bool) -> Workspace:
    p, kv_rows = plan.problem, plan.kv_rows
    rows, width = p.batch * p.heads, plan.inputs.head_dim
    arrays: list[Array] = []
    of_choice: list[Array] = []
    of_parts: list[Array] = []
    if compresses:
        arrays += [
            ("cmp_out", (rows, p.seqlen_q, p.head_dim), "uint16"),
            ("cmp_lse", (p.batch, plan.lse_rows[-1]), "float32"),
        ]
        of_rows = (kv_rows, plan.choice_tokens, plan.weight_rows)
        of_choice.append(("weights", (*of_rows, plan.weight_stride), "float32"))
        if plan.tops:
            of_choice.append(("step_tops", (*of_rows, plan.step_stride, 4), "float32"))
        if plan.fused:
            of_choice += [("step_bases", (*of_rows, plan.step_stride), "float32"), ("head_lse", of_rows, "float32")]
    if attends:
        slots = (kv_rows, plan.tokens, plan.slots, plan.group)
        of_parts += [("parts", (*slots, width), "uint16"), ("part_lse", slots, "float32")]
        arrays += inverted(plan)
        if compresses:
            arrays.append(("chosen", (kv_rows, p.seqlen_q, plan.config.top), "int32"))
    if plan.apart:
        arrays += [("near_out", (rows, p.seqlen_q, width), "uint16"), ("near_lse", (rows, p.seqlen_q), "float32")]
    # All blocks are chosen before a part is written: the two have the same memory.
    whole = lay_out((), [*arrays, *of_choice])
    other = lay_out((), [*arrays, *of_parts])
    return Workspace(whole.places | other.places, 0, max(whole.nbytes, other.nbytes))


def inverted(plan: NsaPlan) -> list[Array]:
    """What says which tokens have chosen each block."""
    return [
        ("counts", (plan.kv_rows, plan.chunks, plan.blocks), "int32"),
        ("begins", (plan.kv_rows, plan.blocks), "int32"),
        ("entries", (plan.kv_rows, plan.tokens * plan.slots), "int32"),
        ("items", (plan.kv_rows, plan.most_items, 4), "int32"),
        ("item_counts", (plan.kv_rows,), "int32"),
    ]


def check(problem: Problem, config: NSAConfig, group: int, where: str, compresses: bool) -> None:
    """Raise what the kernels do not take."""
    if problem.head_dim % 8 or problem.head_dim > kernels.MAX_HEAD_DIM:
        raise ArgumentValueError(
            f"head_dim is {problem.head_dim}; accepted on the GPU: multiples of 8 up to {kernels.MAX_HEAD_DIM}",
            where,
        )
    if group > kernels.MAX_GROUP:
        raise ArgumentValueError(
            f"q has {group} heads for each of k's; accepted on the GPU: up to {kernels.MAX_GROUP}",
            where,
        )
    if config.block not in kernels.BLOCKS:
        raise ArgumentValueError(f"block is {config.block}; accepted on the GPU: 64 or 128", where)
    if config.top > kernels.MAX_SLOTS:
        raise ArgumentValueError(
            f"a token has {config.top} blocks; accepted on the GPU: up to {kernels.MAX_SLOTS}",
            where,
        )
    if compresses and (config.block // config.stride not in (4, 8, 16) or config.length > 2 * config.stride):
        raise ArgumentValueError(
            f"length is {config.length} and stride {config.stride} with blocks of {config.block}; accepted on "
            "the GPU: a stride of a fourth, an eighth or a sixteenth of a block, and that or twice as much as length",
            where,
        )
