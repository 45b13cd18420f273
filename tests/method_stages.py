"""A selection on the GPU stage by stage, each against the reference given what the GPU made before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import line_stages
import numpy as np

from s2o_cupy.arrays.operand import operand
from s2o_cupy.methods.flex_prefill import FlexPrefillConfig
from s2o_cupy.methods.grid import BlockGrid
from s2o_cupy.methods.pbs import PBSConfig
from s2o_cupy.methods.vertical_slash import VerticalSlashConfig
from s2o_cupy.methods.xattention import XAttentionConfig
from s2o_cupy.problem import Problem, validate
from s2o_cupy.reference.methods import blocks, pbs, xattention
from s2o_cupy.spec import LN2, LOG2E

CHOICE = 2.0**-14  # how far weights and their sums may be off, as a share: exp2 of the GPU, and some 2,000 terms
SPLIT = {"float16": 2.0**-21, "bfloat16": 2.0**-16}  # of a mean that is kept as two numbers
FLOAT = 2.0**-24


@dataclass
class Found:
    """What the stages of a selection left, on the host."""

    problem: Problem
    grid: BlockGrid
    arrays: dict[str, Any]  # of the workspace, scores of all rounds [H, R, pitch]
    columns: Any  # bool [B, H, R, C]
    lists: tuple[Any, Any, Any]
    k_order: Any = None
    q_order: Any = None

    def order(self, of: str, like: Any) -> Any:
        """Of rows of q or k [B, heads, L] as each head has it; None: as they lie."""
        order = self.q_order if of == "q" else self.k_order
        if order is None:
            return None
        heads = max(order.shape[1], like.shape[1])
        return np.broadcast_to(order, (len(like), heads, order.shape[2]))


def selected(q: Any, k: Any, config: Any, **options: Any) -> Found:
    """Of host arrays of the GPU's dtypes."""
    import cupy

    from s2o_cupy.methods import launches as select

    problem = validate(
        [q.shape, k.shape, k.shape], [str(q.dtype)] * 3, config=config.of_pass, backend="cupy", **options
    )
    grid, order_heads = config.grid(problem), config.order_heads(problem)
    q, k = cupy.asarray(q), cupy.asarray(k)
    lists = (problem.batch, problem.heads, grid.rows)
    orders = (1 if config.orders_queries else problem.batch, order_heads, problem.seqlen_k)
    made = {
        "entries": cupy.full(problem.batch * problem.heads * grid.entries, 10**9, np.int32),
        "begins": cupy.full(lists, -1, np.int64),
        "keys": cupy.full(lists, -1, np.int32),
        "k_order": cupy.full(orders, -1, np.int32),
        "q_order": cupy.full((problem.batch, problem.heads, problem.seqlen_q), -1, np.int32),
    }
    arrays: dict[str, Any] = {}
    scores = []

    def observe(stage: str, views: Any) -> None:
        if stage == "scores":
            scores.append(cupy.asnumpy(views["scores"]))
        elif stage == "choose" and not arrays:
            arrays.update({name: cupy.asnumpy(x) for name, x in views.items() if name != "scores"})

    select.run(
        operand(q, "BHSD"), operand(k, "BHSD"), {name: x.data.ptr for name, x in made.items()}, problem, config,
        stream=cupy.cuda.get_current_stream().ptr, observe=observe,
    )  # fmt: skip
    if scores:
        arrays["scores"] = np.concatenate(scores)[: problem.batch * problem.heads]
    entries, begins, keys = (cupy.asnumpy(made[name]) for name in ("entries", "begins", "keys"))
    columns = np.zeros((*lists, grid.columns), bool)
    for at in np.ndindex(*lists):
        found = entries[begins[at] : begins[at] + -(-keys[at] // grid.block_k)]
        assert (found < grid.columns).all() and (np.diff(found) > 0).all()
        columns[at][found] = True
    order = cupy.asnumpy(made["k_order"]) if order_heads else None
    q_order = cupy.asnumpy(made["q_order"]) if config.orders_queries else None
    return Found(problem, grid, arrays, columns, (entries, begins, keys), order, q_order)


def wrong_stages(found: Found, q: Any, k: Any, config: Any) -> list[str]:
    """Stages, in order, that made what the reference would not."""
    checks = {
        "importance": _importance, "k_order": _order, "q means": _means, "k means": _means, "similarity": _similarity,
        "scores": _scores, "last sums": _last_sums, "lines": _lines, "choice": _choice, "lists": _lists,
    }  # fmt: skip
    q64, k64 = (x.astype(np.float64) for x in (q, k))
    return [name for name, right in checks.items() if not right(found, q64, k64, config, name)]


def _importance(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if not isinstance(config, PBSConfig):
        return True
    p = found.problem
    exact = pbs.importance(q, k, config.block, p.scale).astype(np.float64)  # [B, H, Lk]
    mine = found.arrays["importance"].reshape(exact.shape)
    most = np.abs(q).sum(axis=-1).max() * np.abs(k).max() * abs(p.scale)  # of a score
    allowed = exact * (np.expm1(2 * most * p.head_dim * FLOAT * 4) + 2.0**-12) + 1e-30
    return bool(((np.abs(mine - exact) <= allowed) | (np.isnan(mine) & np.isnan(exact))).all())


def _order(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if config.orders_queries:
        order = config.token_order(found.problem.seqlen_k)
        return bool((found.k_order == order).all() and (found.q_order == order).all())
    if not isinstance(config, PBSConfig):
        return True
    p = found.problem
    importance = found.arrays["importance"].reshape(p.batch, p.heads, p.seqlen_k)
    expected = pbs.segment_order(importance, config.segment, config.order_heads(p))
    return np.array_equal(found.k_order, expected)


def _decoded(found: Found, of: str) -> Any:
    """Means float64 [heads, blocks, D]."""
    import ml_dtypes

    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[found.problem.dtype]
    parts = found.arrays[f"{of}_means"].view(dtype).astype(np.float64)  # [heads, blocks, 2, width]
    return parts.sum(axis=2)[..., : found.problem.head_dim]


def _means(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if f"{name[0]}_means" not in found.arrays:
        return True
    of, x, block = ("q", q, found.grid.block_q) if name[0] == "q" else ("k", k, found.grid.block_k)
    order = found.order(of, x)
    mine = _decoded(found, of)
    exact = blocks.block_means(x, block, order).reshape(mine.shape)
    size = blocks.block_means(np.abs(x), block, order).reshape(mine.shape)
    finite = np.isfinite(exact).all(axis=-1)
    allowed = size * block * FLOAT + np.abs(exact) * SPLIT[found.problem.dtype] + 2.0**-25
    padding = found.arrays[f"{of}_means"][..., found.problem.head_dim :]
    return bool(
        (np.abs(mine - exact)[finite] <= allowed[finite]).all()
        and np.isnan(mine[~finite]).any(axis=-1).all()
        and (padding == 0).all()
    )


def _similarity(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    for of, x, block in (("q", q, found.grid.block_q), ("k", k, found.grid.block_k)):
        if f"{of}_similarity" in found.arrays:
            mine = found.arrays[f"{of}_similarity"]
            ordered = x if found.q_order is None else np.take_along_axis(x, found.order(of, x)[..., None], axis=2)
            if not np.allclose(mine, blocks.similarity(ordered, block).reshape(mine.shape), rtol=0, atol=2.0**-16):
                return False
    return True


def _last_sums(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    return "sums" not in found.arrays or line_stages.last_sums(found, q, k, config)


def _lines(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if not isinstance(config, FlexPrefillConfig):
        return True
    p = found.problem
    means = _decoded(found, "k").reshape(p.batch, p.kv_heads, found.grid.columns, p.head_dim)
    return line_stages.lines(found, q, means, config)


def _scores(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if "scores" not in found.arrays:
        return True
    if "norms" in found.arrays:
        return _mass(found, q, k, config)
    visible = blocks.visible_columns(found.grid)
    q_means, k_means = _decoded(found, "q")[None], _decoded(found, "k")[None]
    exact = blocks.block_scores(q_means, k_means, found.problem.scale)[0]
    size = blocks.block_scores(np.abs(q_means), np.abs(k_means), abs(found.problem.scale))[0]
    mine = found.arrays["scores"][..., : found.grid.columns] * LN2
    close = np.abs(mine - exact) <= size * 2.0**-15 + 1e-30
    return bool((close | ~visible | (np.isnan(mine) & np.isnan(exact))).all())


def _mass(found: Found, q: Any, k: Any, config: Any) -> bool:
    """Scores are logarithms of mass, whose relative error is that of a score."""
    p, grid = found.problem, found.grid
    if found.k_order is not None:
        k = np.take_along_axis(np.repeat(k, found.k_order.shape[1] // k.shape[1], axis=1), found.k_order[..., None], 2)
    exact = xattention.antidiagonal_mass(q, k, grid, config.stride, p.scale)
    mine = np.exp2(found.arrays["scores"][..., : grid.columns].astype(np.float64)).reshape(exact.shape)
    most = np.abs(q).sum(axis=-1).max() * np.abs(k).max() * abs(p.scale)  # of a score
    allowed = exact * (np.expm1(2 * most * p.head_dim * config.stride * FLOAT) + 2.0**-12) + 1e-30
    close = np.abs(mine - exact) <= allowed
    return bool((close | ~blocks.visible_columns(grid) | (np.isnan(mine) & np.isnan(exact))).all())


def _choice(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    if isinstance(config, VerticalSlashConfig):
        return np.array_equal(found.columns, line_stages.crossed(found, config))
    of: dict[type, Any] = {XAttentionConfig: _by_mass, FlexPrefillConfig: line_stages.flex_choices}
    fewest, most = of.get(type(config), choices)(found, config)
    return bool((found.columns >= fewest).all() and (found.columns <= most).all())


def choices(found: Found, config: Any) -> tuple[Any, Any]:
    """Columns that must be chosen, and those that may be, by the GPU's scores: at either end of the rounding of its
    weights, and either way among weights that rounding does not tell apart. bool [B, H, R, C] each."""
    p, grid = found.problem, found.grid
    scores = found.arrays["scores"][..., : grid.columns].astype(np.float64) / LOG2E
    scores = scores.reshape(p.batch, p.heads, *scores.shape[1:])  # [B, H, R, C]
    forced = _forced(found, config)
    fixed = forced.get("fixed")
    w = blocks.softmax(scores, blocks.visible_columns(grid) & (True if fixed is None else ~fixed[:, :, None]))
    rule = config.rule
    thresholds = np.broadcast_to(np.asarray(config.threshold, np.float64), (p.heads,))
    ends = (0.0, 0.0) if rule == "largest" else (-CHOICE, CHOICE)  # of so many columns no sum is off
    low, high = (
        blocks.choose(scores, grid, rule, np.where(thresholds < 1, np.minimum(thresholds * (1 + e), 1 - 1e-12), 1.0),
                      **forced) for e in ends
    )  # fmt: skip
    low_free, high_free = (
        getattr(blocks, rule)(w, np.where(thresholds < 1, np.minimum(thresholds * (1 + e), 1 - 1e-12), 1.0)[:, None])
        for e in ends
    )
    best_left = np.where(low_free, -np.inf, w).max(axis=-1, keepdims=True)
    least_taken = np.where(high_free, w, np.inf).min(axis=-1, keepdims=True)
    unsure = (w <= best_left * (1 + CHOICE)) & ~_always(forced, low) & (thresholds < 1)[:, None, None]
    if rule == "largest":  # sure is a row that sees no more, whatever its weights
        sees = blocks.visible_columns(grid).sum(axis=-1)
        unsure &= (np.maximum(1, np.floor(thresholds * grid.columns))[:, None] < sees)[..., None]
    may = blocks.listed_columns(grid) & (w >= least_taken * (1 - CHOICE)) & (w > 0)
    return low & ~unsure, high | may


def _by_mass(found: Found, config: XAttentionConfig) -> tuple[Any, Any]:
    """`choices` of XAttention, whose forced columns count."""
    p, grid = found.problem, found.grid
    mass = np.exp2(found.arrays["scores"][..., : grid.columns].astype(np.float64))
    mass = np.where(blocks.visible_columns(grid), mass, 0).reshape(p.batch, p.heads, grid.rows, grid.columns)
    if config.threshold == 1:
        return blocks.listed_columns(grid), blocks.listed_columns(grid)
    low, high = (
        xattention.choose(mass, replace(config, threshold=min(config.threshold * (1 + e), 1 - 1e-12)), grid)
        for e in (-CHOICE, CHOICE)
    )
    forced = np.arange(grid.columns) == 0
    least = lambda taken: np.where(taken & ~forced, mass, np.inf).min(axis=-1, keepdims=True)  # noqa: E731
    listed = blocks.listed_columns(grid)
    unsure = ~forced & (mass <= least(low) * (1 + CHOICE))
    return low & ~unsure, high | (listed & (mass >= least(high) * (1 - CHOICE)))


def _always(forced: dict[str, Any], like: Any) -> Any:
    """Columns that are chosen whatever their weight."""
    always = np.zeros(like.shape, bool)
    if forced.get("kept") is not None:
        always |= (np.arange(like.shape[-1]) == forced["kept"][..., None])[:, :, None]
    if forced.get("fixed") is not None:
        always |= forced["fixed"][:, :, None]
    if forced.get("whole_rows") is not None:
        always |= forced["whole_rows"][..., None]
    return always


def _forced(found: Found, config: Any) -> dict[str, Any]:
    """What of `blocks.choose` is forced, by the GPU's similarities and order."""
    p = found.problem
    forced: dict[str, Any] = {}
    if config.keep_first:
        forced["kept"] = np.zeros((p.batch, p.heads), int)
        if found.k_order is not None and not config.orders_queries:
            kept = pbs.first_column(found.k_order, found.grid.block_k)
            forced["kept"] = np.repeat(kept, p.heads // kept.shape[1], axis=1)
    if "q_similarity" in found.arrays:
        theta = np.broadcast_to(np.asarray(config.theta, np.float32), (p.heads,))[:, None]
        rows = found.arrays["q_similarity"].reshape(p.batch, p.heads, -1)
        columns = found.arrays["k_similarity"].reshape(p.batch, p.kv_heads, -1)
        forced["whole_rows"] = rows < theta
        forced["fixed"] = np.repeat(columns, p.heads // p.kv_heads, axis=1) < theta
    return forced


def _lists(found: Found, q: Any, k: Any, config: Any, name: str) -> bool:
    _, begins, keys = found.lists
    _, expected_begins, expected_keys = blocks.written(found.columns, found.grid)
    return np.array_equal(begins, expected_begins) and np.array_equal(keys, expected_keys)
