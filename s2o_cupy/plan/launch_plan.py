"""From a problem, a configuration and a device's limits to what will be launched.

Pure: no array, no GPU, no CuPy. Everything that a launch needs except pointers is decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..problem import Problem
from ..spec import ORDER_HEAD, PROBE_SAMPLES, STOP_LAG, STRATUM, Geometry, S2OConfig
from .kernels import Kernel
from .rounds import BLOCK_PAIRS, MAX_GRID, STEP, Chunk, near_heads, rounds

__all__ = ["DeviceLimits", "LaunchPlan", "make_plan"]

HEAD_DIMS = (64, 128, 256)  # that kernels are compiled for
SCORE_ROWS = 64  # rows of a block of key_scores (kScoreRows)
SCORE_KEYS = 8 * STEP  # keys of a block of key_scores
HOPPER_SCORE_ROWS = 128  # rows of a block of key_scores_sm90, 64 a warpgroup
HOPPER_SCORE_STAGES = 4  # tiles of STEP keys in its shared memory
HOPPER_SCORE_KEYS = (8 * STEP, 32 * STEP)  # keys of a block: no fewer, and about as many before there is a second wave
SUM_KEYS = 256  # keys of a block of block_sums (kSumBlock)
REFINE_KEYS = 64 * STEP  # keys of a block of refined_scores
MAX_STAGES = 2
WARP, RANK_THREADS = 32, 256


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan depends on. Bytes of shared memory for one block and for one multiprocessor."""

    compute_capability: int
    shared_per_block: int
    shared_per_multiprocessor: int
    multiprocessors: int = 132

    @staticmethod
    def of_architecture(compute_capability: int) -> DeviceLimits:
        """The limits NVIDIA documents (CUDA C++ Programming Guide, technical specifications)."""
        kib = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228, 110: 228}.get(compute_capability, 100)
        return DeviceLimits(compute_capability, (kib - 1) * 1024, kib * 1024)


@dataclass(frozen=True)
class LaunchPlan:
    """Kernels, grid sizes and rounds of one call on the GPU."""

    geometry: Geometry  # a dense call's has one segment and no candidate
    dense: bool
    tiles: int  # pass-2 tiles of a full segment
    pass1_tiles: int
    collect_pages: Kernel | None  # before pass 1, which then reads arrays in the workspace
    pass1: Kernel
    pass2: Kernel
    block_sums: Kernel
    candidate_means: Kernel
    guides: Kernel
    probe: Kernel
    refined_norms: Kernel
    refined_scores: Kernel
    rank_queries: Kernel
    key_scores: Kernel
    key_strata: Kernel
    key_middle: Kernel
    key_order_head: Kernel
    whole: Chunk  # everything: pass 1 runs in one launch
    chunks: tuple[Chunk, ...]  # empty when no segment has a candidate
    sort_slots: int
    map_rows: int  # rows of a box of pass 1's tensor maps of keys and values (Hopper)
    path: str  # "hopper" or "portable"
    path_reason: str | None  # why path="auto" did not take the Hopper kernels on a GPU that has them
    persistent_blocks: int  # of a kernel that takes q tiles from a counter

    @property
    def stop_lag(self) -> int:
        """Of pass 2."""
        return STOP_LAG[self.path]

    @property
    def keeps_state(self) -> bool:
        """Whether pass 1 leaves (m, l) behind. After a dense call nobody reads it, but the portable kernel writes."""
        return not self.dense or self.pass1.function == "pass1"

    @property
    def order_head_rows(self) -> int:
        """Rows of the largest chunk with strata."""
        return max((chunk.rows for chunk in self.chunks if chunk.strata_blocks), default=0)

    @property
    def middle_rows(self) -> int:
        """Rows of the largest chunk with a middle."""
        return max((chunk.rows for chunk in self.chunks if chunk.middle_blocks), default=0)

    @property
    def workspace_elements(self) -> int:
        """Scores, and as many key positions, of the largest chunk."""
        return max((chunk.elements for chunk in self.chunks), default=0)

    @property
    def map_boxes(self) -> tuple[int, int, int]:
        """Rows that one copy by a tensor map brings, of q, k and v."""
        return HOPPER_BLOCK, self.map_rows, self.map_rows

    def score_blocks(self, chunk: Chunk) -> tuple[int, int]:
        """Blocks of key_scores that cover the rows of one KV head, and the keys.

        On Hopper two blocks run on a multiprocessor; all take as many keys, and those that have any fill whole waves.
        """
        rows = chunk.shared_heads * chunk.segments
        if self.key_scores.function == "key_scores":
            return -(-rows // SCORE_ROWS), -(-chunk.longest // SCORE_KEYS)
        row_blocks = -(-rows // HOPPER_SCORE_ROWS)
        slots, (fewest, most) = 2 * self.persistent_blocks, HOPPER_SCORE_KEYS
        tiles = [tiles for tiles in self._score_tiles(chunk) for _ in range(chunk.heads // chunk.shared_heads)]
        waves = -(-sum(tiles) * STEP // (slots * most))
        # The fewest that leave no more blocks than there are places.
        tiles_each = max(fewest // STEP, -(-sum(tiles) // (waves * slots)))
        blocks = lambda each: sum(-(-n // -(-max(tiles) // -(-max(tiles) // each))) for n in tiles)  # noqa: E731
        while blocks(tiles_each) > waves * slots and tiles_each < max(tiles):
            tiles_each += 1
        return row_blocks, -(-max(tiles) // tiles_each)

    @staticmethod
    def _score_tiles(chunk: Chunk) -> list[int]:
        """Tiles of keys that each row block of key_scores_sm90 reads of one KV head: up to its last row's end."""
        last_rows = range(HOPPER_SCORE_ROWS, chunk.shared_heads * chunk.segments, HOPPER_SCORE_ROWS)
        last = [(row - 1) // chunk.shared_heads for row in last_rows] + [chunk.segments - 1]
        return [(chunk.stride + i * chunk.growth) // STEP for i in last]


def padded_head_dim(head_dim: int) -> int:
    return next(padded for padded in HEAD_DIMS if head_dim <= padded)


def _attention_shared(head_dim: int, block_m: int, stages: int, step: int = STEP) -> int:
    """sizeof(AttentionTraits::Shared)."""
    tiles = (block_m + 2 * stages * step) * head_dim * 2
    ring, p_column, nonfinite, pointers, first_key = (2 * stages + 2) * step * 4, block_m * 4, 8, 4 * 8, 8
    return tiles + ring + p_column + nonfinite + pointers + first_key


def _blocks(head_dim: int, block_m: int, stages: int, limits: DeviceLimits, step: int = STEP) -> int:
    """Blocks that shared memory allows on a multiprocessor, of the one or two that registers do."""
    reserved = 1024  # of each block, by the driver
    size = _attention_shared(head_dim, block_m, stages, step)
    fits = size <= limits.shared_per_block
    most = 2 if head_dim * block_m <= 128 * 128 else 1
    return min(most, limits.shared_per_multiprocessor // (size + reserved)) if fits else 0


def step_for(head_dim: int, block_m: int, limits: DeviceLimits) -> int:
    """Keys of a step: half as many where shared memory holds no other of them beside the queries."""
    return STEP if _blocks(head_dim, block_m, 1, limits) else STEP // 2


def stages_for(head_dim: int, block_m: int, limits: DeviceLimits, aligned: bool = True) -> int:
    """Steps in flight: the most that leave room for as many blocks on a multiprocessor as one step would.

    Without alignment copies are synchronous, and a second step is only taken where two blocks have room for it.
    """
    step = step_for(head_dim, block_m, limits)
    blocks = {stages: _blocks(head_dim, block_m, stages, limits, step) for stages in range(1, MAX_STAGES + 1)}
    wanted = max(blocks.values()) if aligned else 2
    return max((stages for stages, n in blocks.items() if n >= wanted), default=1)


def _attention(
    function: str, dtype: str, head_dim: int, aligned: bool, block_m: int, limits: DeviceLimits, softcap: bool = False,
    paged: bool = False,
) -> Kernel:  # fmt: skip
    stages, step = stages_for(head_dim, block_m, limits, aligned), step_for(head_dim, block_m, limits)
    shared = _attention_shared(head_dim, block_m, stages, step)
    return Kernel(
        function, dtype, head_dim, aligned, block_m, stages, step, softcap=softcap, paged=paged, shared_bytes=shared
    )


HOPPER_BLOCK = 128  # rows of a Hopper tile, and keys between two looks at whether to stop
HOPPER_STAGES = 2  # key and value tiles in shared memory; 3 are no faster
HOPPER_SCORE_HEAD_DIM = 128  # up to which keys are scored by wgmma
SMALLEST_BOX = 32  # rows that one copy of a page brings: gathering is faster than boxes of 16 (docs/kernels.md)
SMALLEST_SCALE = 2.0**-126  # kernels are compiled to flush what is smaller to 0


def hopper_block_n(head_dim: int) -> int:
    """Keys of a Hopper tile (sm90::Traits::kBlockN)."""
    return 64 if head_dim > 128 else 128


def hopper_query_places(head_dim: int) -> int:
    """Query tiles in shared memory (sm90::Traits::kQueryPlaces)."""
    return 1 if head_dim > 128 else 2


def page_box(geometry: Geometry, page_size: int, head_dim: int) -> int:
    """Rows of a page that the copy engine brings at once in pass 1; 0: it does not, and rows are gathered.

    As many as a page or a tile has, if the keys that segments' tiles begin with are multiples of it.
    """
    box = min(hopper_block_n(head_dim), page_size)
    from_key_0 = geometry.window >= geometry.seqlen_k  # every segment
    starts = 0 if from_key_0 else math.gcd(geometry.segment, geometry.offset - geometry.window)
    return box if box >= SMALLEST_BOX and starts % box == 0 else 0


# Query rows of a KV head from which a dense call copies the keys and values of its pages to arrays first, where pass 1
# would gather them: gathering costs a seventh of pass 1, copying as much as attending to some 5,000 queries saves; with
# half as many as this the host took longer for a second launch than the GPU saved.
COLLECT_ROWS = 16384
COLLECT_CHUNK = 16  # bytes that a thread copies at once
COLLECT_CHUNKS = 4 * 256  # that a block copies of keys, and of values


def collected_chunks(problem: Problem) -> int:
    """Chunks of keys, and of values, of a paged cache that is copied to arrays."""
    return problem.batch * problem.kv_heads * problem.seqlen_k * (problem.head_dim * 2 // COLLECT_CHUNK)


def _collects(problem: Problem, config: S2OConfig) -> bool:
    chunks = collected_chunks(problem)
    fits = 2 * chunks * COLLECT_CHUNK <= config.workspace_bytes and chunks < 2**31 - COLLECT_CHUNKS
    return fits and problem.seqlen_q * (problem.heads // problem.kv_heads) >= COLLECT_ROWS


def _hopper(function: str, dtype: str, head_dim: int, softcap: bool = False, paged: bool = False) -> Kernel:
    """A Hopper pass; its shared memory is sizeof(sm90::Traits::Shared)."""
    keys, queries = 2 * HOPPER_STAGES * hopper_block_n(head_dim), hopper_query_places(head_dim) * HOPPER_BLOCK
    tiles = (keys + queries) * head_dim * 2
    places, item = 4, 12 * 4
    rows, work, votes = 2 * HOPPER_BLOCK * 4, places * (4 + item), 2 * 4 + 4 * 8
    barriers = (4 + 4 * HOPPER_STAGES + 4 + 4 + 2 * places) * 8
    next_tile = 2 * 8 + 4 * 4 + 2 * HOPPER_BLOCK * 4
    shared = tiles + rows + work + next_tile + votes + barriers
    return Kernel(
        function, dtype, head_dim, stages=HOPPER_STAGES, softcap=softcap, paged=paged, shared_bytes=shared
    )


def hopper_refusal(
    problem: Problem, config: S2OConfig, limits: DeviceLimits, aligned: bool, compact: bool
) -> str | None:
    """Why the Hopper kernels cannot run a problem, or None."""
    if limits.compute_capability != 90:
        return f"the GPU has compute capability {limits.compute_capability / 10}, not 9.0"
    if not aligned:
        return "a row of q, k, v or out does not start on 16 bytes, or head_dim is no multiple of 8"
    if not compact:
        return "rows, heads or batches of q, k or v are in descending order of address, or rows more than 64 GiB apart"
    if problem.scale <= 0:
        return f"scale is {problem.scale}, not positive"
    if problem.scale < SMALLEST_SCALE:  # a masked score, minus infinity, times 0 would be NaN
        return f"scale is {problem.scale}, which is 0 in float32"
    if (config.block_m, config.block_n) != (HOPPER_BLOCK, HOPPER_BLOCK):
        return f"block_m and block_n are {config.block_m} and {config.block_n}, not {HOPPER_BLOCK}"
    return None


def pass1_block_m(head_dim: int, limits: DeviceLimits) -> int:
    """Query rows of a portable pass-1 tile. With 128 of head_dim 128, ptxas of some CUDA versions spills registers
    for sm_120. Of head_dim 256 a multiprocessor runs two blocks of 64 rows, or else one of 128."""
    if head_dim > 128:
        return 64 if _blocks(head_dim, 64, 1, limits) == 2 else 128
    return 64 if limits.compute_capability >= 120 else 128


def _rank_queries(
    function: str, dtype: str, head_dim: int, sort_slots: int, aligned: bool, paged: bool = False
) -> Kernel:
    """Its shared memory is sizeof(RankTraits::Shared) or, for more slots, larger."""
    of_guides, products, segment = RANK_THREADS * 8 * 4, head_dim * (32 + 4 * 4), 48
    shared = max(of_guides, products) + segment + sort_slots * 4
    return Kernel(function, dtype, head_dim, aligned, paged=paged, shared_bytes=shared)


def _tail(function: str, dtype: str, head_dim: int, paged: bool = False) -> Kernel:
    return Kernel(function, dtype, head_dim, paged=paged, shared_bytes=RANK_THREADS * 8 * 4)


def _key_scores(dtype: str, head_dim: int, aligned: bool, paged: bool = False) -> Kernel:
    return Kernel("key_scores", dtype, head_dim, aligned, paged=paged, shared_bytes=2 * STEP * head_dim * 2 + 16)


def _hopper_key_scores(dtype: str, head_dim: int, paged: bool = False) -> Kernel:
    """Its shared memory is sizeof(KeyScoresTraits::Shared)."""
    shared = (HOPPER_SCORE_ROWS + HOPPER_SCORE_STAGES * STEP) * head_dim * 2
    return Kernel("key_scores_sm90", dtype, head_dim, paged=paged, shared_bytes=shared)


def _refine(function: str, dtype: str, head_dim: int, paged: bool = False) -> Kernel:
    """Its shared memory is sizeof(RefineTraits::Shared)."""
    warps, tiles = RANK_THREADS // 32, 1 if function == "probe" or head_dim > 128 else 2
    rows, parts = 16 * tiles * warps * head_dim * 2, 4 * warps * STEP * 4
    shared = rows + parts + PROBE_SAMPLES * (4 + 4 + 8) + warps * 4 + 8
    return Kernel(function, dtype, head_dim, paged=paged, shared_bytes=shared)


def _hopper_refined_scores(dtype: str, head_dim: int, paged: bool = False) -> Kernel:
    """Its shared memory is sizeof(RefinedScoresTraits::Shared)."""
    pooled_queries, stages = 256, 2
    tiles = (pooled_queries + stages * STEP) * head_dim * 2
    shared = tiles + pooled_queries * 4 + 4 * 4 + 2 * 4
    return Kernel("refined_scores_sm90", dtype, head_dim, paged=paged, shared_bytes=shared)


def _key_strata(function: str = "key_strata") -> Kernel:
    return Kernel(function, shared_bytes=BLOCK_PAIRS * (STRATUM * 4 + STRATUM // 4 * 4))


def _key_order_head() -> Kernel:
    digits, warps = 32, RANK_THREADS // WARP
    return Kernel("key_order_head", shared_bytes=ORDER_HEAD * 4 + digits * RANK_THREADS * 2 + digits * 4 + warps * 8)


# Keys up to which dense attention is at least as fast as ordering and stopping: on an H200 with the model trace of
# docs/kernels.md, 8,192 keys take the same time either way, and dense attention makes no error.
DENSE_UP_TO = 8192


def is_dense(problem: Problem, config: S2OConfig) -> bool:
    """Whether the call is plain dense attention: one pass, no order."""
    if config.dense_up_to is None:
        return config.tau == 0 or problem.seqlen_k <= DENSE_UP_TO
    return problem.seqlen_k <= config.dense_up_to


def packed_pass1(plan: LaunchPlan) -> Kernel:
    """The kernel that is to many packed sequences what pass 1 of a dense plan is to one."""
    return replace(plan.pass1, function=plan.pass1.function.replace("pass1", "pass1_packed"))


def make_plan(
    problem: Problem, config: S2OConfig, limits: DeviceLimits, aligned: bool, compact: bool = True, page_size: int = 0
) -> LaunchPlan:
    """Decide kernels, tiles and rounds. Raises ValueError if the problem exceeds the largest grid.

    ``aligned``: rows are whole chunks of 16 bytes. ``compact``: 32 bits hold a row's offset in such chunks.
    ``page_size``: of a paged cache that k and v are, or 0.
    """
    paged = page_size > 0
    if paged and not aligned:
        raise ValueError(
            "s2o_attention_paged: a row of q, k_pages, v_pages or out does not start on 16 bytes, or head_dim "
            f"({problem.head_dim}) is no multiple of 8; accepted on the GPU: rows that do, in multiples of 8 elements"
        )
    dense = is_dense(problem, config)
    geometry = problem.geometry(config)
    if dense:  # one segment, whose own keys and window are all keys
        geometry = replace(geometry, segment=max(1, problem.seqlen_q), window=problem.seqlen_k)
    head_dim, heads = padded_head_dim(problem.head_dim), problem.batch * problem.heads
    refusal, softcap = hopper_refusal(problem, config, limits, aligned, compact), problem.softcap > 0
    if config.path == "hopper" and refusal:
        raise ValueError(f"S2OConfig: path is 'hopper', but {refusal}; accepted: 'auto' or 'portable'")
    path = "portable" if config.path == "portable" or refusal else "hopper"
    block_m1 = HOPPER_BLOCK if path == "hopper" else pass1_block_m(head_dim, limits)
    sort_slots = max(WARP, 1 << (min(config.segment, problem.seqlen_q) - 1).bit_length())  # at most MAX_SEGMENT
    assert config.coarse.pooled_queries is not None
    tiles, pass1_tiles = geometry.block_count(config.block_m), geometry.block_count(block_m1)
    grid = heads * max(2, geometry.segments * max(pass1_tiles, tiles, config.coarse.pooled_queries))
    if grid > MAX_GRID:
        raise ValueError(
            f"q has {heads} heads x {geometry.segments} segments, {grid} blocks; accepted: up to {MAX_GRID}. "
            "Use a larger segment or fewer heads in one call"
        )
    map_rows = page_box(geometry, page_size, head_dim) if paged else hopper_block_n(head_dim)
    key_scores = _key_scores(problem.dtype, head_dim, aligned, paged)
    refined_scores = _refine("refined_scores", problem.dtype, head_dim, paged)
    collects = False
    if path == "portable":
        pass1 = _attention("pass1", problem.dtype, head_dim, aligned, block_m1, limits, softcap, paged)
        pass2 = _attention("pass2", problem.dtype, head_dim, aligned, config.block_m, limits, softcap, paged)
    else:
        collects = dense and paged and not map_rows and _collects(problem, config)
        if collects:
            map_rows = hopper_block_n(head_dim)
        name1 = "pass1_gathered_sm90" if paged and not map_rows else "pass1_sm90"
        pass1 = _hopper(name1, problem.dtype, head_dim, softcap, paged and not collects)
        pass2 = _hopper("pass2_sm90", problem.dtype, head_dim, softcap, paged)
        if head_dim <= HOPPER_SCORE_HEAD_DIM:
            refined_scores = _hopper_refined_scores(problem.dtype, head_dim, paged)
            if config.coarse.pooled_queries == 1:
                key_scores = _hopper_key_scores(problem.dtype, head_dim, paged)
    return LaunchPlan(
        geometry=geometry,
        dense=dense,
        tiles=tiles,
        pass1_tiles=pass1_tiles,
        collect_pages=Kernel("collect_pages") if collects else None,
        pass1=pass1,
        pass2=pass2,
        block_sums=_tail("block_sums", problem.dtype, head_dim, paged),
        candidate_means=_tail("candidate_means", problem.dtype, head_dim, paged),
        guides=_rank_queries("guides", problem.dtype, head_dim, sort_slots, aligned, paged),
        probe=_refine("probe", problem.dtype, head_dim, paged),
        refined_norms=_refine("refined_norms", problem.dtype, head_dim, paged),
        refined_scores=refined_scores,
        rank_queries=_rank_queries("rank_queries", problem.dtype, head_dim, sort_slots, aligned),
        key_scores=key_scores,
        key_strata=_key_strata(),
        key_middle=_key_strata("key_middle"),
        key_order_head=_key_order_head(),
        whole=Chunk(
            0, heads, 0, geometry.segments, problem.heads // problem.kv_heads, near_heads(problem, heads), 0, 0
        ),
        chunks=rounds(problem, config, geometry),
        sort_slots=sort_slots,
        map_rows=map_rows,
        path=path,
        path_reason=refusal if config.path == "auto" and limits.compute_capability == 90 else None,
        persistent_blocks=limits.multiprocessors,
    )
