"""From a problem, a configuration and a device's limits to what will be launched.

Pure: no array, no GPU, no CuPy. Everything that a launch needs except pointers is decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import ArgumentValueError
from ..problem import Problem
from ..spec import Geometry, Pass, S2OConfig
from .device import DeviceLimits
from .kernels import Family, Inputs, Kernel, Path, padded_head_dim
from .method import Choose, Method, NothingChosen, Setting
from .paths import choose_path
from .rounds import MAX_GRID, Chunk, Grid, near_heads

__all__ = [
    "DENSE_UP_TO", "DeviceLimits", "LaunchPlan", "check_fp8_keys", "dense_limit", "dense_reason", "is_dense",
    "make_plan", "packed_pass1", "padded_head_dim",
]  # fmt: skip


# Q tiles for each multiprocessor up to which the blocks of a dense call are dealt theirs: a counter in memory, which
# spreads more of them better, takes the host as long to clear as to launch a kernel.
DEALT_ROUNDS = 8


@dataclass(frozen=True)
class LaunchPlan:
    """Kernels, grid sizes and rounds of one call on the GPU."""

    of_pass: Pass
    geometry: Geometry  # a dense call's has one segment and no candidate
    dense: bool
    tiles: int  # pass-2 tiles of a full segment
    pass1_tiles: int
    runs_on: Path
    path_reason: str | None  # why path="auto" did not take a faster path that the GPU has
    limits: DeviceLimits
    inputs: Inputs
    page_size: int  # of a paged cache that k and v are, or 0
    collect_pages: Kernel | None  # before all others, which then read arrays in the workspace
    pass1: Kernel
    pass2: Kernel
    map_boxes: tuple[int, ...]  # rows of a box of pass 1's tensor maps of q, k and v; empty: it has none
    maps_whole_rows: bool  # those of k and v have boxes of all columns
    method: Method  # what chooses keys
    whole: Chunk  # everything: pass 1 runs in one launch
    chunks: tuple[Chunk, ...]  # rounds of ordering and pass 2; empty when no segment has a candidate

    @property
    def path(self) -> str:
        """The path's name."""
        return self.runs_on.name

    @property
    def stop_lag(self) -> int:
        """Of pass 2."""
        return self.runs_on.stop_lag

    @property
    def keeps_state(self) -> bool:
        """Whether pass 1 leaves (m, l) behind. After a dense call nobody reads it."""
        return not self.dense or self.runs_on.keeps_dense_state

    @property
    def gathers_pages(self) -> bool:
        """Whether pass 1 gathers rows of pages one by one."""
        return self.runs_on.gathers_pages and not self.map_boxes

    @property
    def counts_q_tiles(self) -> bool:
        """Whether blocks take q tiles from counters in memory."""
        dealt = self.dense and self.whole.rows * self.pass1_tiles <= DEALT_ROUNDS * self.limits.multiprocessors
        return self.runs_on.persistent and not (dealt and self.map_boxes)

    def blocks(self, kernel: Kernel, q_tiles: int) -> int:
        """Of a launch of pass 1 or 2."""
        return self.runs_on.blocks(kernel, q_tiles, self.limits)

    @property
    def pass1_grid(self) -> Grid:
        return Grid(self.whole, self.pass1_tiles, self.blocks(self.pass1, self.whole.rows * self.pass1_tiles))

    def grid(self, chunk: Chunk, kernel: Kernel | None = None) -> Grid:
        """Of pass 2, or of a kernel in its place."""
        kernel = kernel or self.pass2
        heads = kernel.tile_heads
        return Grid(chunk, self.tiles, self.blocks(kernel, chunk.rows // heads * self.tiles), heads)


# Query rows of a KV head from which a dense call copies the keys and values of its pages to arrays first, where pass 1
# would gather them: gathering costs a seventh of pass 1, copying as much as attending to some 5,000 queries saves; with
# half as many as this the host took longer for a second launch than the GPU saved.
COLLECT_ROWS = 16384
COLLECT_CHUNK = 16  # bytes that a thread copies at once
COLLECT_CHUNKS = 4 * 256  # that a block copies of keys, and of values
MAX_CHUNKS = 2**31 - COLLECT_CHUNKS  # of a launch
COLLECT_PAGES = Kernel(Family("collect_pages", "collect_pages.cu", "CollectPagesParams", 256, 4))
FP8_PAGES = Family("fp8_pages", "fp8_pages.cu", "Fp8PagesParams", 256, 4, traits="Fp8Traits<{element}>")


def collected_chunks(problem: Problem) -> int:
    """Chunks of keys, and of values, of a paged cache that is copied to arrays."""
    return problem.batch * problem.kv_heads * problem.seqlen_k * (problem.head_dim * 2 // COLLECT_CHUNK)


def check_fp8_keys(problem: Problem) -> None:
    """Whether one launch reads them."""
    chunks = collected_chunks(problem)
    if chunks >= MAX_CHUNKS:
        most = (MAX_CHUNKS - 1) * problem.seqlen_k // chunks
        raise ArgumentValueError(
            f"seqlen_k is {problem.seqlen_k} with batch {problem.batch}, {problem.kv_heads} KV heads and head_dim "
            f"{problem.head_dim} of an fp8 cache; accepted: up to {most}, which are read into 64 GiB"
        )


def _collects(problem: Problem, config: S2OConfig) -> bool:
    chunks = collected_chunks(problem)
    fits = 2 * chunks * COLLECT_CHUNK <= config.workspace_bytes and chunks < MAX_CHUNKS
    return fits and problem.seqlen_q * (problem.heads // problem.kv_heads) >= COLLECT_ROWS


# Keys up to which dense attention is as fast as ordering and stopping, or takes little longer and is exact. On an H200
# both took as long with 4, 8, 12, 16 and 32 query heads of 128 at about 13,000, 11,300, 9,200, 7,700 and 7,400 keys of
# a whole prompt, of 64 at 10,700, 8,700, 7,600, 7,100 and 7,000, with 16 of 256 at 7,800: with few heads each of a
# dozen launches leaves a GPU idle. So in eighths of DENSE_UP_TO the limit goes with the root of DENSE_HEADS over the
# heads, a sixth less up to a head_dim of 64, and is seven of them or more, eight above 128. Other sequences of a batch
# have no part in it, as each is to have the bits of a call of its own.
DENSE_UP_TO, DENSE_HEADS, MOST_EIGHTHS = 8192, 16, 12


def is_dense(problem: Problem, config: S2OConfig | Pass) -> bool:
    """Whether the call is plain dense attention: one pass, no order."""
    if isinstance(config, Pass):
        return config.segment is None
    return problem.seqlen_k <= dense_limit(config, problem.heads, problem.head_dim)


def dense_limit(config: S2OConfig, heads: int, head_dim: int) -> float:
    """Keys up to which a call on a GPU is plain dense attention. ``heads``: query heads."""
    if config.dense_up_to is not None:
        return config.dense_up_to
    return math.inf if config.never_stops else dense_by_default(heads, head_dim)


def dense_by_default(heads: int, head_dim: int) -> int:
    """The same, where nobody says how many."""
    eighths = min(int(8 * math.sqrt(DENSE_HEADS / max(1, heads))), MOST_EIGHTHS)
    if head_dim <= 64:
        eighths = eighths * 5 // 6
    return DENSE_UP_TO * max(eighths, 7 if head_dim <= 128 else 8) // 8


def dense_reason(problem: Problem, config: S2OConfig) -> str | None:
    """Why a call is plain dense attention; None where it is not."""
    limit = dense_limit(config, problem.heads, problem.head_dim)
    if problem.seqlen_k > limit:
        return None
    return "tau is 0" if limit == math.inf else f"seqlen_k is {problem.seqlen_k:,}, and dense_up_to {limit:,}"


def packed_pass1(plan: LaunchPlan) -> Kernel:
    """The kernel that is to many packed sequences what pass 1 of a dense plan is to one."""
    return plan.runs_on.packed(plan.pass1)


def make_plan(
    problem: Problem, config: S2OConfig | Pass, limits: DeviceLimits, aligned: bool, compact: bool, page_size: int,
    choose: Choose, fp8: bool = False,
) -> LaunchPlan:  # fmt: skip
    """Decide kernels, tiles and rounds. Raises ValueError if the problem exceeds the largest grid.

    ``aligned``: rows are whole chunks of 16 bytes. ``compact``: 32 bits hold a row's offset in such chunks.
    ``page_size``: of a paged cache that k and v are, or 0. ``choose``: S2O's way to choose keys; with a Pass nothing is
    chosen. ``fp8``: k and v are arrays that are read from a paged cache of 8 bits first.
    """
    paged = page_size > 0
    if (paged or fp8) and not aligned:
        raise ArgumentValueError(
            "a row of q, k_pages, v_pages or out does not start on 16 bytes, or head_dim "
            f"({problem.head_dim}) is no multiple of 8; accepted on the GPU: rows that do (of an fp8 cache on 8 "
            "bytes), in multiples of 8 elements"
        )
    if fp8:
        check_fp8_keys(problem)
    dense = is_dense(problem, config)
    of_pass = config if isinstance(config, Pass) else config.of_pass
    geometry = problem.geometry(replace(of_pass, segment=None) if dense else of_pass)
    path, reason = choose_path(problem, of_pass, limits, aligned, compact)
    wants_tail = isinstance(config, S2OConfig) and config.wants_tail
    inputs = Inputs(problem.dtype, padded_head_dim(problem.head_dim), aligned, paged, problem.softcap > 0, wants_tail)
    tiles = geometry.block_count(of_pass.block_m)
    pass1_tiles = geometry.block_count(path.pass1_rows(inputs.head_dim, limits))
    heads = problem.batch * problem.heads
    whole = Chunk(0, heads, 0, geometry.segments, problem.heads // problem.kv_heads, near_heads(problem, heads), 0, 0)
    method: Method = NothingChosen()
    if isinstance(config, S2OConfig):
        method = choose(Setting(problem, config, geometry, inputs, path, limits, whole))
    grid = max(whole.rows * max(pass1_tiles, tiles), method.largest_grid)
    if grid > MAX_GRID:
        raise ValueError(
            f"q has {heads} heads x {geometry.segments} segments, {grid} blocks; accepted: up to {MAX_GRID}. "
            "Use a larger segment or fewer heads in one call"
        )
    boxes = path.map_boxes(geometry, problem.head_dim, page_size)
    gathers = dense and path.gathers_pages and not boxes
    collects = gathers and isinstance(config, S2OConfig) and _collects(problem, config)
    if collects:
        boxes = path.map_boxes(geometry, problem.head_dim, 0)
    whole_rows = paged and not collects and path.maps_whole_rows(problem.head_dim, boxes)
    collect = Kernel(FP8_PAGES, problem.dtype) if fp8 else COLLECT_PAGES if collects else None
    return LaunchPlan(
        of_pass=of_pass,
        geometry=geometry,
        dense=dense,
        tiles=tiles,
        pass1_tiles=pass1_tiles,
        runs_on=path,
        path_reason=reason,
        limits=limits,
        inputs=inputs,
        page_size=page_size,
        collect_pages=collect,
        pass1=path.pass1(replace(inputs, paged=paged and not collects), limits, bool(boxes), whole_rows),
        pass2=path.pass2(inputs, limits, of_pass.block_m),
        map_boxes=boxes,
        maps_whole_rows=whole_rows,
        method=method,
        whole=whole,
        chunks=method.chunks,
    )
