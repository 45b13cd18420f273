"""The paths: what each set of pass kernels can do, which problems it takes, and which kernels it runs them with.

kernels.py says what a path answers. Of S2O nobody but the paths compares architectures or names of kernels. A new
architecture is a class here, its lag in spec.STOP_LAG and a folder of kernels. Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..problem import GPU_BLOCK_M, Problem
from ..spec import TAIL_EVIDENCE, TAIL_SAMPLES, Geometry, Pass
from .device import DeviceLimits
from .kernels import BOX_COLUMNS, Family, Inputs, Kernel, Path, box_keys, padded_head_dim
from .rounds import STEP

__all__ = ["HOPPER", "PATHS", "PORTABLE", "WRITTEN_FOR", "choose_path", "device_path", "is_written_for", "path_of"]


# --- mma.sync, compute capability 8.0 and newer ---
_TRAITS = "AttentionTraits<{element}, {head_dim}, {block_m}, {stages}, {aligned}, {step}, {paged}>"
MAX_STAGES = 2


def attention_shared(head_dim: int, block_m: int, stages: int, step: int = STEP) -> int:
    """sizeof(AttentionTraits::Shared)."""
    tiles = (block_m + 2 * stages * step) * head_dim * 2
    ring, p_column, nonfinite, pointers, first_key, stop = (2 * stages + 2) * step * 4, block_m * 4, 8, 4 * 8, 8, 16
    return tiles + ring + p_column + nonfinite + pointers + first_key + stop


def blocks_that_fit(head_dim: int, block_m: int, stages: int, limits: DeviceLimits, step: int = STEP) -> int:
    """Blocks that shared memory allows on a multiprocessor, of the one or two that registers do."""
    reserved = 1024  # of each block, by the driver
    size = attention_shared(head_dim, block_m, stages, step)
    fits = size <= limits.shared_per_block
    most = 2 if head_dim * block_m <= 128 * 128 else 1
    return min(most, limits.shared_per_multiprocessor // (size + reserved)) if fits else 0


def step_for(head_dim: int, block_m: int, limits: DeviceLimits) -> int:
    """Keys of a step: half as many where shared memory holds no other of them beside the queries."""
    return STEP if blocks_that_fit(head_dim, block_m, 1, limits) else STEP // 2


def stages_for(head_dim: int, block_m: int, limits: DeviceLimits, aligned: bool = True) -> int:
    """Steps in flight: the most that leave room for as many blocks on a multiprocessor as one step would.

    Without alignment copies are synchronous, and a second step is only taken where two blocks have room for it.
    """
    step = step_for(head_dim, block_m, limits)
    blocks = {stages: blocks_that_fit(head_dim, block_m, stages, limits, step) for stages in range(1, MAX_STAGES + 1)}
    wanted = max(blocks.values()) if aligned else 2
    return max((stages for stages, n in blocks.items() if n >= wanted), default=1)


class _Portable(Path):
    def runs_on(self, compute_capability: int) -> bool:
        return compute_capability >= 80

    def has_int8(self, limits: DeviceLimits) -> bool:
        """Blackwell Ultra has next to none (NVIDIA's data sheets)."""
        return limits.compute_capability != 103

    def refusal(
        self, problem: Problem, of_pass: Pass, limits: DeviceLimits, aligned: bool, compact: bool
    ) -> str | None:
        return None

    def pass1_rows(self, head_dim: int, limits: DeviceLimits) -> int:
        """With 128 of head_dim 128, ptxas of some CUDA versions spills registers for sm_120. Of head_dim 256 a
        multiprocessor runs two blocks of 64 rows, or else one of 128."""
        if head_dim > 128:
            return 64 if blocks_that_fit(head_dim, 64, 1, limits) == 2 else 128
        return 64 if limits.compute_capability >= 120 else 128

    def pass1(self, inputs: Inputs, limits: DeviceLimits, maps: bool, whole_rows: bool = False) -> Kernel:
        return self._kernel(PASS1, inputs, limits, self.pass1_rows(inputs.head_dim, limits))

    def pass2(self, inputs: Inputs, limits: DeviceLimits, block_m: int) -> Kernel:
        return self._kernel(PASS2, inputs, limits, block_m)

    def packed(self, pass1: Kernel) -> Kernel:
        return replace(pass1, family=PASS1_PACKED)

    def listed(self, pass2: Kernel, skips_values: bool = False) -> Kernel:
        kernel = replace(pass2, family=PASS2_SKIPPING if skips_values else PASS2_LISTED)
        if pass2.aligned or (pass2.head_dim, pass2.block_m) != (128, 128):
            return kernel
        # Copies without alignment and scores of 64 keys are more than the registers of sm_120 hold, capped of any.
        return self._with_short_steps(kernel)

    @staticmethod
    def _with_short_steps(kernel: Kernel) -> Kernel:
        shared = attention_shared(kernel.head_dim, kernel.block_m, kernel.stages, STEP // 2)
        return replace(kernel, step=STEP // 2, shared_bytes=shared)

    def laddered(self, pass2: Kernel) -> Kernel:
        """Registers hold less, as there are the taus besides; of head_dim 64 they hold enough."""
        kernel = replace(pass2, family=PASS2_LADDER)
        return self._with_short_steps(kernel) if kernel.head_dim > 64 else kernel

    def ladder_blocks(self, kernel: Kernel, q_tiles: int, limits: DeviceLimits) -> int:
        each = blocks_that_fit(kernel.head_dim, kernel.block_m, kernel.stages, limits, kernel.step)
        return min(q_tiles, each * limits.multiprocessors)

    def catalogue(self, inputs: Inputs, limits: DeviceLimits, packed: bool, skips_values: bool) -> Iterator[Kernel]:
        pass1 = self.pass1(inputs, limits, maps=False)
        yield pass1
        if packed:
            yield self.packed(pass1)
        for block_m in GPU_BLOCK_M:
            pass2 = self.pass2(inputs, limits, block_m)
            yield pass2
            yield self.listed(pass2)  # of the last queries
            if skips_values:
                yield self.listed(pass2, skips_values=True)

    @staticmethod
    def _kernel(family: Family, inputs: Inputs, limits: DeviceLimits, block_m: int) -> Kernel:
        head_dim = inputs.head_dim
        stages, step = stages_for(head_dim, block_m, limits, inputs.aligned), step_for(head_dim, block_m, limits)
        return Kernel(
            family, inputs.dtype, head_dim, inputs.aligned, block_m, stages, step, inputs.softcap, inputs.paged,
            attention_shared(head_dim, block_m, stages, step),
        )  # fmt: skip


PORTABLE = _Portable(
    "portable", None, persistent=False, keeps_dense_state=True, gathers_pages=False, wgmma_head_dim=0
)
PASS1, PASS1_PACKED, PASS2, PASS2_LISTED = (
    Family(function, f"sm80/{source}.cu", params, 128, "256 / {threads}", _TRAITS)
    for function, source, params in (
        ("pass1", "pass1", "AttentionParams"),
        ("pass1_packed", "pass1", "PackedAttentionParams"),
        ("pass2", "pass2", "AttentionParams"),
        ("pass2_listed", "pass2", "ListedAttentionParams"),
    )
)
PASS2_SKIPPING = replace(
    PASS2_LISTED, function="pass2_skipping", params_type="SkippingAttentionParams",
    traits=f"SkippingTraits<s2o::{_TRAITS}>",
)  # fmt: skip

PASS2_LADDER = replace(
    PASS2, function="pass2_ladder", params_type="LadderAttentionParams", traits=f"LadderTraits<s2o::{_TRAITS}>"
)

# --- wgmma and the copy engine, compute capability 9.0 ---
_HOPPER_TRAITS = "sm90::Traits<{element}, {head_dim}, {stages}, {paged}>"
HOPPER_BLOCK = 128  # rows of a Hopper tile, and keys between two stop checks
# Rows of a tile of pass 2, up to head_dim 128, where a multiprocessor holds two blocks of one computing warpgroup.
HOPPER_HALF = 64
HOPPER_STAGES = 2  # key and value tiles in shared memory; 3 are no faster
# Rows that one copy of a page brings: gathering is faster than smaller boxes. With all columns of 16 rows a box is as
# large as one of 64 columns of 32 rows (docs/notebook/pages.md).
SMALLEST_BOX, SMALLEST_WHOLE_BOX = 32, 16
SMALLEST_SCALE = 2.0**-126  # kernels are compiled to flush what is smaller to 0


def hopper_block_n(head_dim: int, block_m: int = HOPPER_BLOCK) -> int:
    """Keys of a Hopper tile (sm90::Traits::kBlockN)."""
    return 64 if head_dim > 128 or block_m == HOPPER_HALF else 128


def hopper_query_places(head_dim: int) -> int:
    """Query tiles in shared memory (sm90::Traits::kQueryPlaces)."""
    return 1 if head_dim > 128 else 2


class _Hopper(Path):
    def runs_on(self, compute_capability: int) -> bool:
        return compute_capability == 90

    def refusal(
        self, problem: Problem, of_pass: Pass, limits: DeviceLimits, aligned: bool, compact: bool
    ) -> str | None:
        if not self.runs_on(limits.compute_capability):
            return f"the GPU has compute capability {limits.compute_capability / 10}, not 9.0"
        if not aligned:
            return "a row of q, k, v or out does not start on 16 bytes, or head_dim is no multiple of 8"
        if not compact:
            return (
                "rows, heads or batches of q, k or v are in descending order of address, or rows more than 64 GiB apart"
            )
        if problem.scale <= 0:
            return f"scale is {problem.scale}, not positive"
        if problem.scale < SMALLEST_SCALE:  # a masked score, minus infinity, times 0 would be NaN
            return f"scale is {problem.scale}, which is 0 in float32"
        if of_pass.block_n != HOPPER_BLOCK:
            return f"block_n is {of_pass.block_n}, not {HOPPER_BLOCK}"
        accepted = self.block_ms_of(problem.head_dim)
        if of_pass.block_m not in accepted:
            of = f" with head_dim {problem.head_dim}" if len(accepted) == 1 else ""
            return f"block_m is {of_pass.block_m}, not {' or '.join(map(str, accepted))}{of}"
        return None

    def block_ms_of(self, head_dim: int) -> tuple[int, ...]:
        return self.block_ms if head_dim <= 128 else (HOPPER_BLOCK,)

    def pass1_rows(self, head_dim: int, limits: DeviceLimits) -> int:
        return HOPPER_BLOCK

    def map_boxes(self, geometry: Geometry, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Of a page as many rows as it or a tile has, if the keys that segments' tiles begin with are multiples of it.
        Rows of other pages are gathered."""
        box = hopper_block_n(head_dim)
        if page_size > 0:
            box = min(box, page_size)
            from_key_0 = geometry.window >= geometry.seqlen_k  # every segment
            first = geometry.offset - geometry.window
            if geometry.segment % geometry.unit == 0:
                first -= first % geometry.unit
            else:  # some begin with every unit
                first = geometry.unit
            starts = 0 if from_key_0 else math.gcd(geometry.segment, first)
            whole = head_dim <= BOX_COLUMNS or head_dim == padded_head_dim(head_dim)
            if box < (SMALLEST_WHOLE_BOX if whole else SMALLEST_BOX) or starts % box != 0:
                return ()
        return HOPPER_BLOCK, box, box

    def maps_whole_rows(self, head_dim: int, boxes: tuple[int, ...]) -> bool:
        return head_dim > BOX_COLUMNS and bool(boxes) and boxes[1] < SMALLEST_BOX

    def pass1(self, inputs: Inputs, limits: DeviceLimits, maps: bool, whole_rows: bool = False) -> Kernel:
        if not maps:
            return self._kernel(PASS1_GATHERED_SM90, inputs)
        return self._kernel(PASS1_WHOLE_ROWS_SM90 if whole_rows else PASS1_SM90, inputs)

    def pass2(self, inputs: Inputs, limits: DeviceLimits, block_m: int) -> Kernel:
        """Two blocks on a multiprocessor for tiles of 64 rows, and with head_dim 64, whose products are short. A tail
        takes longer by two. A call that would have one but for its tau of 0 takes one block as well, so that its heads
        have the bits that they have beside others."""
        if block_m == HOPPER_HALF:
            return self._kernel(PASS2_HALF_SM90, inputs, block_m)
        two_blocks = inputs.head_dim == 64 and not inputs.wants_tail
        return self._kernel(PASS2_TWO_BLOCKS_SM90 if two_blocks else PASS2_SM90, inputs)

    def packed(self, pass1: Kernel) -> Kernel:
        return replace(pass1, family=_PACKED_SM90[pass1.family])

    def by_boxes(self, pass2: Kernel, unit: int, head_dim: int, page_size: int = 0) -> Kernel:
        """Gathering units of keys takes a seventh longer (docs/notebook/passes.md)."""
        if head_dim != pass2.head_dim or (page_size | unit) % box_keys(head_dim) != 0:
            return pass2
        if pass2.paged and pass2.family is PASS2_SKIPPING_SM90:
            return pass2  # whose registers do not suffice
        return replace(pass2, family=_BOXES_SM90.get(pass2.family, pass2.family))

    def with_tail(self, pass2: Kernel) -> Kernel | None:
        """Of tiles of 128: a tile of keys is then as large as half of a sample."""
        if pass2.family is not PASS2_SM90 or hopper_block_n(pass2.head_dim) != TAIL_SAMPLES // 2:
            return None
        even = TAIL_EVIDENCE // 2 * 2 * 128 * 4  # float32 of two warpgroups
        shared = pass2.shared_bytes + pass2.head_dim * 4 + 8 + even
        return replace(pass2, family=PASS2_TAIL_SM90, shared_bytes=shared)

    def laddered(self, pass2: Kernel) -> Kernel:
        return replace(pass2, family=PASS2_LADDER_HALF_SM90 if pass2.block_m == HOPPER_HALF else PASS2_LADDER_SM90)

    def ladder_blocks(self, kernel: Kernel, q_tiles: int, limits: DeviceLimits) -> int:
        return self.blocks(kernel, q_tiles, limits)

    def listed(self, pass2: Kernel, skips_values: bool = False) -> Kernel:
        return replace(pass2, family=(_SKIPPING_SM90 if skips_values else _LISTED_SM90)[pass2.family])

    def paired(self, listed: Kernel) -> Kernel | None:
        """Of tiles of 64: they fill one of 128, which reads keys half as often."""
        if listed.family is not PASS2_LISTED_HALF_SM90:
            return None
        inputs = Inputs(listed.dtype, listed.head_dim, paged=listed.paged, softcap=listed.softcap)
        return replace(self._kernel(PASS2_LISTED_PAIRS_SM90, inputs), tile_heads=2)

    def catalogue(self, inputs: Inputs, limits: DeviceLimits, packed: bool, skips_values: bool) -> Iterator[Kernel]:
        if not inputs.aligned:
            return
        firsts = [self.pass1(inputs, limits, maps=True)]
        if inputs.paged:
            firsts.append(self.pass1(inputs, limits, maps=False))
            if inputs.head_dim > 64:
                firsts.append(self.pass1(inputs, limits, maps=True, whole_rows=True))
        for pass1 in firsts:
            yield pass1
            if packed:
                yield self.packed(pass1)
        for block_m in self.block_ms_of(inputs.head_dim):
            pass2, tailed = (
                self.pass2(replace(inputs, wants_tail=wants), limits, block_m) for wants in (False, True)
            )
            seconds = [pass2, (listed := self.listed(pass2)), self.with_tail(tailed), self.paired(listed)]
            if tailed.name != pass2.name:
                seconds.append(tailed)
            if skips_values:
                seconds.append(self.listed(pass2, skips_values=True))
            for kernel in filter(None, seconds):
                yield kernel
                if (by_boxes := self.by_boxes(kernel, HOPPER_BLOCK, kernel.head_dim)) != kernel:
                    yield by_boxes

    @staticmethod
    def _kernel(family: Family, inputs: Inputs, block_m: int = HOPPER_BLOCK) -> Kernel:
        """Its shared memory is sizeof(sm90::Traits::Shared)."""
        head_dim = inputs.head_dim
        keys, queries = 2 * HOPPER_STAGES * hopper_block_n(head_dim, block_m), hopper_query_places(head_dim) * block_m
        tiles = (keys + queries) * head_dim * 2
        places, item = 4, 12 * 4
        rows, work, votes = 2 * block_m * 4, places * (4 + item + 3 * 4), 2 * 4 + 4 * 8 + block_m // 16 * 4
        barriers = (4 + 4 * HOPPER_STAGES + 4 + 4 + 2 * places) * 8
        next_tile = 2 * 8 + (6 * 4 + 2 * HOPPER_BLOCK * 4)
        shared = tiles + rows + work + next_tile + votes + barriers
        return Kernel(
            family, inputs.dtype, head_dim, block_m=block_m, stages=HOPPER_STAGES, softcap=inputs.softcap,
            paged=inputs.paged, shared_bytes=shared,
        )  # fmt: skip


HOPPER = _Hopper(
    "hopper", "sm_90a", persistent=True, keeps_dense_state=False, gathers_pages=True, wgmma_head_dim=128,
    suffix="_sm90",
)
PASS1_SM90, PASS1_PACKED_SM90, PASS1_GATHERED_SM90, PASS1_PACKED_GATHERED_SM90, PASS2_SM90, PASS2_LISTED_SM90 = (
    Family(f"{name}_sm90", f"sm90/{source}.cu", params, 384, 1, _HOPPER_TRAITS, path=HOPPER)
    for name, source, params in (
        ("pass1", "pass1", "MappedAttentionParams"),
        ("pass1_packed", "pass1", "MappedPackedAttentionParams"),
        ("pass1_gathered", "pass1_gathered", "AttentionParams"),
        ("pass1_packed_gathered", "pass1_gathered", "PackedAttentionParams"),
        ("pass2", "pass2", "AttentionParams"),
        ("pass2_listed", "pass2", "ListedAttentionParams"),
    )
)
PASS2_LISTED_PAIRS_SM90 = replace(PASS2_LISTED_SM90, function="pass2_listed_pairs_sm90")
PASS2_SKIPPING_SM90 = replace(
    PASS2_LISTED_SM90, function="pass2_skipping_sm90", params_type="SkippingAttentionParams",
    traits=f"SkippingTraits<s2o::{_HOPPER_TRAITS}>",
)  # fmt: skip

PASS2_TAIL_SM90 = replace(
    PASS2_SM90, function="pass2_tail_sm90", params_type="TailAttentionParams",
    traits=f"WithTail<s2o::{_HOPPER_TRAITS}>",
)  # fmt: skip
PASS2_LADDER_SM90 = replace(
    PASS2_SM90, function="pass2_ladder_sm90", params_type="LadderAttentionParams",
    traits=f"LadderTraits<s2o::{_HOPPER_TRAITS}>",
)  # fmt: skip

_HALF_TRAITS = _HOPPER_TRAITS.replace("{paged}", "{paged}, {block_m}")
PASS2_HALF_SM90, PASS2_LISTED_HALF_SM90, PASS2_SKIPPING_HALF_SM90, PASS2_LADDER_HALF_SM90 = (
    replace(x, threads=256, blocks_per_multiprocessor=2, traits=(x.traits or "").replace(_HOPPER_TRAITS, _HALF_TRAITS))
    for x in (PASS2_SM90, PASS2_LISTED_SM90, PASS2_SKIPPING_SM90, PASS2_LADDER_SM90)
)
# Of head_dim 64, with two blocks of q tiles of 128 on a multiprocessor: 256 threads that compute and two warps to copy.
_TWO_BLOCKS = f"sm90::TwoBlockTraits<s2o::{_HOPPER_TRAITS}>"
PASS2_TWO_BLOCKS_SM90, PASS2_LISTED_TWO_BLOCKS_SM90 = (
    replace(x, threads=320, blocks_per_multiprocessor=2, traits=_TWO_BLOCKS) for x in (PASS2_SM90, PASS2_LISTED_SM90)
)
_LISTED_SM90 = {
    PASS2_SM90: PASS2_LISTED_SM90, PASS2_HALF_SM90: PASS2_LISTED_HALF_SM90,
    PASS2_TWO_BLOCKS_SM90: PASS2_LISTED_TWO_BLOCKS_SM90,
}  # fmt: skip
_SKIPPING_SM90 = {
    PASS2_SM90: PASS2_SKIPPING_SM90, PASS2_HALF_SM90: PASS2_SKIPPING_HALF_SM90,
    PASS2_TWO_BLOCKS_SM90: PASS2_SKIPPING_SM90,
}  # fmt: skip

# The same where units come by boxes, of q tiles whose rows are neighbours.
_BOXES_SM90 = {
    x: replace(
        x, function=x.function.replace("pass2_", "pass2_boxes_"),
        params_type=f"MappedUnits{x.params_type.replace('Attention', '')}",
        traits=(x.traits or "").replace("sm90::Traits", "sm90::BoxTraits"),
    )
    for x in (
        PASS2_SM90, PASS2_TAIL_SM90, PASS2_LISTED_SM90, PASS2_LISTED_PAIRS_SM90, PASS2_SKIPPING_SM90,
        PASS2_LISTED_HALF_SM90, PASS2_SKIPPING_HALF_SM90, PASS2_TWO_BLOCKS_SM90, PASS2_LISTED_TWO_BLOCKS_SM90,
    )
}  # fmt: skip

_WHOLE_ROWS_TRAITS = _HOPPER_TRAITS.replace("Traits", "WholeRowTraits")
PASS1_WHOLE_ROWS_SM90, PASS1_PACKED_WHOLE_ROWS_SM90 = (
    replace(x, function=x.function.replace("_sm90", "_whole_rows_sm90"), traits=_WHOLE_ROWS_TRAITS)
    for x in (PASS1_SM90, PASS1_PACKED_SM90)
)
_PACKED_SM90 = {
    PASS1_SM90: PASS1_PACKED_SM90, PASS1_WHOLE_ROWS_SM90: PASS1_PACKED_WHOLE_ROWS_SM90,
    PASS1_GATHERED_SM90: PASS1_PACKED_GATHERED_SM90,
}  # fmt: skip

PATHS: tuple[Path, ...] = (HOPPER, PORTABLE)  # the fastest first


WRITTEN_FOR = (80, 90)  # compute capabilities that kernels are written for; others run those


def is_written_for(compute_capability: int) -> bool:
    return compute_capability in WRITTEN_FOR


def path_of(compute_capability: int) -> Path | None:
    """The fastest path that a device runs; None: it runs none."""
    return next((path for path in PATHS if path.runs_on(compute_capability)), None)


def device_path(limits: DeviceLimits, name: str = "auto") -> Path:
    """The path whose kernels a device runs where no problem decides: the fastest, or with ``name`` the portable one."""
    if name == PORTABLE.name:
        return PORTABLE
    return path_of(limits.compute_capability) or PORTABLE


def choose_path(
    problem: Problem, of_pass: Pass, limits: DeviceLimits, aligned: bool, compact: bool
) -> tuple[Path, str | None]:
    """The path that runs a problem, and why path="auto" did not take a faster one that the GPU has.

    Raises ValueError where the path that ``of_pass`` names cannot run it.
    """
    reason = None
    for path in PATHS:
        refusal = path.refusal(problem, of_pass, limits, aligned, compact)
        if of_pass.path in ("auto", path.name) and refusal is None:
            return path, reason
        if of_pass.path == path.name:
            others = " or ".join(repr(name) for name in ("auto", *(x.name for x in PATHS if x is not path)))
            raise ValueError(f"S2OConfig: path is {path.name!r}, but {refusal}; accepted: {others}")
        if of_pass.path == "auto" and path.runs_on(limits.compute_capability):
            reason = reason or refusal
    raise AssertionError("the last path takes every problem")
