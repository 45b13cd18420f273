"""A fault planted in a kernel is found by ``diff``, at its own stage and at none before it.

Each fault changes the text of one kernel, as a slip of the hand would.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
from conftest import has_gpu, has_hopper
from gpu_cases import Case, run_diff
from least_faults import BY_HEAD, LEAST_CASES, LEAST_FAULTS, PASS2
from order_faults import order_faults
from query_faults import (
    BYTES,
    BYTES_OF_EACH_KEY,
    EACH_KEY,
    INTEGERS,
    INTEGERS_OF_GROUPS,
    ON_HOPPER,
    QUERY,
    QUERY_AROUND,
    QUERY_FAULTS,
)
from row_faults import row_faults
from tail_faults import TAIL, TAIL_FAULTS

from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import compiler
from s2o_cupy.plan.kernels import Kernel
from s2o_cupy.tools.catalogue import kernels_for


@dataclass(frozen=True)
class Fault:
    name: str
    stage: str  # where diff must report it first
    functions: tuple[str, ...]  # kernels whose text is changed
    old: str
    new: str
    case: Case

    @property
    def path(self) -> str:
        of_hopper = self.functions[0].endswith("sm90") or self.case in ON_HOPPER
        return "hopper" if of_hopper else "portable"

    def plant(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.name}: its place in the source is gone or no longer the only one"
        return text.replace(self.old, self.new)


MEAN = Case(heads=4, kv_heads=2, seqlen_q=700, segment=256, block_m=64, block_n=64,
            options={"rank": "mean", "window": 30})  # fmt: skip
MAX = Case(heads=4, kv_heads=2, seqlen_q=700, segment=256, block_m=64, block_n=64,
           options={"rank": "max", "pooled_queries": 3})  # fmt: skip
# Several steps of units, two tiles of pooled queries in each segment, and a last segment of few queries.
UNITS = Case(heads=4, kv_heads=2, seqlen_q=1100, segment=256, block_m=64, block_n=64,
             options={"unit": 8, "rank": "weight"})  # fmt: skip
# Several tiles of units and blocks of segments of the kernel for up to 16 pooled queries.
HOPPER_UNITS = Case(heads=4, kv_heads=2, seqlen_q=2600, segment=128, head_dim=128,
                    options={"unit": 8, "rank": "weight"})  # fmt: skip
HOPPER_AROUND = replace(HOPPER_UNITS, seqlen_q=600, seqlen_k=1100 + 3, is_causal=False)
ONE_TILE = Case(heads=4, kv_heads=2, seqlen_q=700, segment=60, head_dim=72, block_m=64, block_n=64,
                options={"pooled_queries": 9})  # fmt: skip
# The units before a segment and those after it, the last of which is short.
AROUND = replace(UNITS, seqlen_q=600, seqlen_k=1000 + 3, is_causal=False)
HOPPER = Case(heads=4, kv_heads=2, seqlen_q=1400, segment=512, head_dim=128, options={"window": 30})
# Units that the copy engine brings, in segments of one q tile.
BOXES = replace(HOPPER, segment=128, options={"unit": 8, "rank": "weight"})
# Two blocks on a multiprocessor, which walk halves of key tiles; the last tile is not whole.
HALVES = replace(HOPPER, seqlen_q=1080, segment=120, head_dim=64, options={"unit": 8, "rank": "weight"})
HALVES_CASES = {
    "halves": HALVES,
    "halves by boxes": replace(HALVES, options={"rank": "weight"}),
    # Many more than an H200 has blocks, so that enough of them stop where their neighbours' rows and keys would not.
    "halves of many q tiles": replace(HALVES, heads=40, kv_heads=8, seqlen_q=2040, tau=0.2),
}
# A key that the mean query puts last and some queries put first, by more than a weight can hold.
RISING = replace(HOPPER, tau=0.0, options={"rank": "mean", "window": 30}, poison=("k", 100, -2000.0))


def _faults(function: str | tuple[str, ...], case: Case, *rows: tuple[str, str, str, str]) -> list[Fault]:
    functions = (function,) if isinstance(function, str) else function
    return [Fault(name, stage, functions, old, new, case) for name, stage, old, new in rows]


FAULTS = [
    *_faults(
        "guides", MEAN,
        ("the guide's sign is wrong", "query order", ": sum / count;", ": -sum / count;"),
        ("the guide leaves out a key", "query order", "r < count; r += Traits",
         "r < count - 1; r += Traits"),
    ),
    *_faults(
        "rank_queries", MAX,
        ("a mean divides by a full run's length", "pooled_queries", "p.sign / (end - begin)",
         "p.sign / p.run"),
        ("a sum leaves out a warp's part", "pooled_queries", "w = 0; w < team", "w = 1; w < team"),
        ("a mean leaves out its last query", "pooled_queries", "8 * u < left", "8 * u + 1 < left"),
        ("a mean's elements are mixed up", "pooled_queries", "32 * j + 8 * t + g]", "32 * j + 8 * t + (g ^ 1)]"),
        ("queries ascend", "query order", "~sortable(score)", "sortable(score)"),
        ("neighbours are written the other way round", "query order", "order[i] = shared", "order[i ^ 1] = shared"),
        ("every segment has the first one's guide", "query order", "(n > 0)) * kHeadDim", "0) * kHeadDim"),
        ("half of the products have the others' elements", "query order", "8 * t + 4 * h;", "8 * t;"),
        ("neighbours exchange their scores", "query order", "t * 2 + g % 2;", "t * 2 + 1 - g % 2;"),
        ("the sort merges in a wrong direction", "query order", "(low & size) == 0", "(low & stride) == 0"),
        ("offsets are lost", "query order", "& ~kOffsetMask | r;", "& ~kOffsetMask | (r & ~1);"),
    ),
    # Of few dimensions, so that rounding shows beside the bits that are cut from a score.
    *_faults("rank_queries", replace(MEAN, head_dim=8),
        ("the guide is rounded", "query order", "part < g; ++part", "part < 0; ++part"),
    ),
    *_faults(
        "pool_queries", ONE_TILE,
        ("a mean divides by a full run's length", "pooled_queries", "p.sign / (end - begin)", "p.sign / p.run"),
        ("a mean leaves out its last query", "pooled_queries", "r < end; r += stride", "r < end - 1; r += stride"),
        ("rows that are read together are not added up", "pooled_queries", "int step = kLanes; step < 32;",
         "int step = kLanes; step < 16;"),
        ("two elements are exchanged", "pooled_queries", "store_global_16(mean + lane * 8, packed[0], packed[1],",
         "store_global_16(mean + lane * 8, packed[1], packed[0],"),
        ("the next run's place", "pooled_queries", "means + run * Traits", "means + (run ^ 1) * Traits"),
    ),
    *_faults(
        "pool_queries", replace(ONE_TILE, options={"pooled_queries": 3}),
        ("warps that share a run read the same queries", "pooled_queries", "begin + threadIdx.x / kLanes",
         "begin + slot"),
    ),
    *_faults(
        "key_scores", MAX,
        ("half of the products are left out", "key scores", "Element::mma(s[j + 1], mean[c], x[2], x[3]);", ""),
        ("only the first pooled query counts", "key scores", "r < p.pooled_queries; ++r", "r < 1; ++r"),
        ("a pooled query's columns are mixed up", "key scores", "from[i % 2][c * 8 + i / 2 * 4]",
         "from[i / 2][c * 8 + i % 2 * 4]"),
        ("scores go to the wrong keys", "key scores", "+ step * kStep + j * 8 + lane % 4 * 2;",
         "+ step * kStep + (j ^ 1) * 8 + lane % 4 * 2;"),
        ("a lesser pooled query wins", "key scores", '"max.NaN.f32 %0, %1, %2;" : "=f"(y)',
         '"min.NaN.f32 %0, %1, %2;" : "=f"(y)'),
    ),
    *_faults(
        "unit_keys", UNITS,
        ("a mean leaves out its last key", "unit means", "end_row; ++r) {\n      read_row<Traits>(x, shared.rows + r * "
         "Traits::kHeadDim, lane, Traits::kHeadDim, true);\n#pragma unroll\n      for (int e = 0; e < 8; ++e) mean",
         "end_row - 1; ++r) {\n      read_row<Traits>(x, shared.rows + r * "
         "Traits::kHeadDim, lane, Traits::kHeadDim, true);\n#pragma unroll\n      for (int e = 0; e < 8; ++e) mean"),
        ("a mean is half of it", "unit means", "1.f / (1 << g.unit_shift)", "0.5f / (1 << g.unit_shift)"),
        ("units are shifted by one", "unit means", "(begin >> g.unit_shift) + u) * 2",
         "(begin >> g.unit_shift) + (u ^ 1)) * 2"),
        ("every KV head has the first one's keys", "unit means", "(p.k, batch, kv_head % p.kv_heads)",
         "(p.k, batch, 0)"),
        ("two columns are exchanged", "unit means", "mean[6], mean[7]", "mean[7], mean[6]"),
        ("the nearest key is the outlier", "outliers", "if (distance > furthest) {",
         "if (furthest < 0.f || distance < furthest) {"),
        ("a lane has its own outlier", "outliers", "distance += __shfl_xor_sync(kFullWarp, distance, step);", ";"),
        ("the last key is no outlier", "outliers", "int outlier = begin_row;\n    for (int r = begin_row; r < end_row;",
         "int outlier = begin_row;\n    for (int r = begin_row; r < end_row - 1;"),
    ),
    *_faults(
        "unit_keys", replace(UNITS, head_dim=33),
        ("a row's last element is left out", "unit means", "shared.offsets[r], lane * 8, g.head_dim)",
         "shared.offsets[r], lane * 8, g.head_dim - 1)"),
    ),
    *_faults(
        "unit_weights", UNITS,
        ("a norm is left out", "key scores", "weight(i, j, 0) - norms[0],", "weight(i, j, 0),"),
        ("half of the pooled queries do not count", "key scores", "weight(i, j, 1) - norms[8])",
         "weight(i, j, 0) - norms[0])"),
        ("an outlier is a unit", "key scores", "-static_cast<float>(p.geometry.unit_shift + spec::kOutlierShift)",
         "0.f"),
        ("norms are of outliers too", "key scores", "kUnitKeys / kRows * Traits::kHeadDim",
         "Traits::kHeadDim"),
        ("the last tile of pooled queries is skipped", "key scores", "further < tiles;", "further < tiles - 1;"),
        ("another tile's norms are taken", "key scores", "r = tile * kPooledTile + lane / 4;",
         "r = lane / 4;"),
        ("a pooled query's columns are mixed up", "key scores", "from[e % 2][c * 8 + e / 2 * 4]",
         "from[e / 2][c * 8 + e % 2 * 4]"),
        ("scores go to the neighbours", "key scores", "at = step * kUnits + lane;",
         "at = step * kUnits + (lane ^ 1);"),
        ("lanes keep their maxima", "key scores",
         "larger_or_nan(mine, __shfl_xor_sync(kFullWarp, theirs, 4 * kHalf))",
         "mine"),
        ("a norm lacks what other lanes found", "key scores",
         "- base);\n          sum += __shfl_xor_sync(kFullWarp, sum, 1);", "- base);"),
        ("a norm is not rescaled", "key scores",
         "l[i][h] * exp2_approx(m[i][h] - base) + sum;", "l[i][h] + sum;"),
        ("units of the future are in a norm", "key scores", "first + kUnitTiles * 8 > begin[i]", "false"),
        ("half of a norm's scores are natural", "key scores",
         "sum += exp2_approx(fmaf(s[i][j][2 * h], p.scale_log2,",
         "sum += exp2_approx(fmaf(s[i][j][2 * h], p.scale_log2 * 0.6931f,"),
        ("a segment has its neighbour's norms", "key scores", "norms = shared.norms[warp * kOfWarp + i]",
         "norms = shared.norms[warp * kOfWarp + (i ^ 1)]"),
        ("every head has the first one's units", "key scores", "p.unit_keys + kv_head() *",
         "p.unit_keys + 0 *"),
    ),
    *_faults(
        "unit_weights", replace(UNITS, options={"unit": 8, "pooled_queries": 5}),
        ("the next segment's pooled queries count", "key scores", "(is_pooled ? r : 0)", "r"),
    ),
    *_faults(
        "unit_weights", replace(UNITS, poison=("k", 37, 200.0)),  # which its unit's mean hides
        ("outliers do not count", "key scores", "fmaf(s[i][j][2 * h + 1], p.scale_log2,\n",
         "fmaf(s[i][j][2 * h], p.scale_log2,\n"),
    ),
    *_faults(
        "unit_weights", AROUND,
        ("units of the segment itself are in a norm", "key scores", "begin[i] + (g.units() - g.ranked(segment[i]))",
         "begin[i]"),
    ),
    *_faults(
        "unit_weights_sm90", HOPPER_UNITS,
        ("a norm is left out", "key scores", "-outlier_shift)) - norm[h];", "-outlier_shift));"),
        ("half of the pooled queries do not count", "key scores", "larger_or_nan(weight(j, 0), weight(j, 1))",
         "larger_or_nan(weight(j, 0), weight(j, 0))"),
        ("an outlier is a unit", "key scores", "p.scale_log2, -outlier_shift))", "p.scale_log2, 0.f))"),
        ("norms are of outliers too", "key scores", "tile < norm_tiles ? 1 : 2;", "2;"),
        ("a pooled query's columns are mixed up", "key scores", "r % 64, chunk),", "r % 64, chunk ^ 1),"),
        ("rows stand as they are copied", "key scores", "(i & ~15) | (i & 2) << 2 | (i >> 1 & 6) | (i & 1)", "i"),
        ("a column is read twice", "key scores", "c / 4 * (kRows * 128) + c % 4 * 32", "c / 4 * (kRows * 128)"),
        ("scores go to the neighbours", "key scores", "const int unit = first + 2 * lane;",
         "const int unit = first + 2 * (lane ^ 1);"),
        ("lanes keep their maxima", "key scores",
         "Float16::larger_or_nan(mine, __shfl_xor_sync(kFullWarp, theirs, 4 * kHalf))", "mine"),
        ("a norm lacks what other lanes found", "key scores",
         "- base);\n    sum += __shfl_xor_sync(kFullWarp, sum, 1);", "- base);"),
        ("a norm is not rescaled", "key scores", "l[h] = l[h] * exp2_approx(m[h] - base) +", "l[h] = l[h] +"),
        ("units of the future are in a norm", "key scores", "if (behind > begin &&", "if (false &&"),
        ("half of a norm's scores are natural", "key scores",
         "sum[j % 4] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2,",
         "sum[j % 4] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2 * 0.6931f,"),
        ("a pooled query has another's norm", "key scores", "- norm[h];", "- norm[1 - h];"),
        ("every head has the first one's units", "key scores", "p.unit_keys + kv_head() *",
         "p.unit_keys + 0 *"),
        ("a tile is copied over the next", "key scores", "place + tile % kStages *", "place + (tile + 1) % kStages *"),
    ),
    *_faults(
        "unit_weights_sm90", replace(HOPPER_UNITS, options={"unit": 8, "pooled_queries": 5}),
        ("the next segment's pooled queries count", "key scores", "(is_pooled ? r : 0)", "r"),
    ),
    *_faults(
        "unit_weights_sm90", replace(HOPPER_UNITS, poison=("k", 37, 200.0)),  # which its unit's mean hides
        ("outliers do not count", "key scores", "fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -outlier_shift)",
         "fmaf(s[j * 4 + 2 * h], p.scale_log2, -outlier_shift)"),
    ),
    *_faults(
        "unit_weights_sm90", HOPPER_AROUND,
        ("units of the segment itself are in a norm", "key scores", "begin + (g.units() - g.ranked(segment))",
         "begin"),
    ),
    *_faults(
        "part_lists", replace(UNITS, options={"unit": 8, "dense_last": 1}),
        ("the last queries miss a key", "lse", "before - begin)));", "before - begin))) - 1;"),
    ),
    *_faults(
        "merge_last", replace(UNITS, options={"unit": 8, "dense_last": 1}),
        ("the last queries' own keys weigh nothing", "output", "total += own_weight;", ""),
        ("they have the wrong base", "lse", "weights.lse * kLn2", "weights.lse"),
        ("they are not counted", "stop", "if (of_segment % p.block_m == 0)", "if (of_segment < 0)"),
    ),
    *_faults(
        "pass2", replace(UNITS, tau=0.0),
        ("half of a unit's keys come twice", "output", "(step * kStep + i & (1 << unit_shift) - 1)", "0"),
    ),
    *_faults(
        "pass2", replace(UNITS, tau=0.0, options={"unit": 2, "rank": "weight"}),  # too few to be copied together
        ("one of two keys comes twice", "output", "(i & (1 << unit_shift) - 1)", "(i & (1 << unit_shift) - 2)"),
    ),
    *_faults(
        "pass2_sm90", replace(HOPPER, tau=0.0),
        ("half of a unit's keys come twice", "output", "(i & p.geometry.unit_mask())",
         "(i & p.geometry.unit_mask() - 1)"),
    ),
    *_faults(
        "pass1", MEAN,
        ("the diagonal lets one key of the future through", "pass 1 state", "if (key >= limit", "if (key > limit"),
        ("the window is forgotten", "pass 1 state", "offset() - window)", "offset())"),
        ("the sum is not rescaled", "pass 1 state", "mass[i][h] *= rescale_by;", ""),
        ("the score's scale is natural", "pass 1 state", "weigh([&](float) { return scale(); })",
         "weigh([&](float) { return scale() * 0.6931f; })"),
        ("the last stop check is left out", "pass 1 state", "if (step + 1 == steps ||", "if ("),
        ("columns of k are exchanged", "pass 1 state", "lane / 16 * 8, lane / 8 % 2);",
         "lane / 16 * 8, 1 - lane / 8 % 2);"),
        ("the output is not rescaled", "pass 1 output", "acc[i][d][2 * h + 1] *= rescale_by;", ""),
        ("the output is 1 % too large", "pass 1 output", "0.f : 1.f / l[i][h]", "0.f : 1.01f / l[i][h]"),
        ("two weights are exchanged", "pass 1 output", "a[i][1] = p[i][j][1];\n        a[i][2] = p[i][j + 1][0];",
         "a[i][1] = p[i][j + 1][0];\n        a[i][2] = p[i][j][1];"),
    ),
    *_faults(
        "pass2", MEAN,
        ("tau is halved", "stop", "sum < tau * l", "sum < tau * 0.5f * l"),
        ("one row of many decides", "stop", "small &= row", "small = row"),
        ("rows past the segment's end keep a tile going", "stop", "row(i, h) >= rows || sum", "sum"),
        ("the mass before the tile is not rescaled", "stop", "        l[i][h] *= rescale_by;\n", ""),
        ("one visited tile is not counted", "stop", "rows.visited(params) = visited;",
         "rows.visited(params) = visited - 1;"),
        ("the state's output is not multiplied by l", "output", "Element::high(pairs[h][d]) * l[i][h]",
         "Element::high(pairs[h][d])"),
        ("the output is not rescaled", "output", "acc[i][d][2 * h] *= rescale_by;", ""),
        ("the output is 1 % too small", "output", "0.f : 1.f / l[i][h]", "0.f : 0.99f / l[i][h]"),
        ("two columns of v are exchanged", "output", "Element::mma(acc[i][d + 1], a[i], b[2], b[3]);",
         "Element::mma(acc[i][d + 1], a[i], b[3], b[2]);"),
        ("lse is in units of log2", "lse", " * 0.69314718055994531f", ""),
        ("lse lacks the maximum", "lse", "(m[i][h] + __log2f(l[i][h]))", "(__log2f(l[i][h]))"),
    ),
    *_faults(
        "pass2", replace(MEAN, tau=BY_HEAD),
        ("every head has the first one's tau", "stop", "taus[head] : tau", "taus[0] : tau"),
    ),
    *_faults(
        PASS2, replace(HOPPER, tau=BY_HEAD, options={"window": 30, "rank": "weight", "tail": "first_order"}),
        ("every head has the first one's tau", "stop", "taus[head] : tau", "taus[0] : tau"),
        ("a q tile's tau is not announced", "stop", "shared.tau[place] = shared.next.tau;",
         "shared.tau[place] = 0.f;"),
    ),
    *_faults(
        "head_taus", replace(MEAN, tau=BY_HEAD),
        ("heads have their neighbour's numbers", "stop", "= p.values[i];", "= p.values[i ^ 1];"),
    ),
    *_faults(
        "pass1", replace(MEAN, softcap=3.0),
        ("scores are not capped", "pass 1 state", "tanh_approx(x * params.cap_scale)", "x * params.cap_scale"),
    ),
    *_faults(
        "pass2", replace(MEAN, softcap=3.0),
        ("scores are not capped", "stop", "tanh_approx(x * params.cap_scale)", "x * params.cap_scale"),
    ),
    *_faults(
        "pass2", TAIL,
        ("the first tile never stops", "stop", "(small && has_least(visited))",
         "(small && has_least(visited) && visited > 1)"),
    ),
    *_faults(
        "key_scores_sm90", replace(HOPPER, options={"rank": "mean", "window": 30}),
        ("keys stand as they are copied", "key scores", "(i & ~31) + (i & 6) * 4 + (i & 24) / 4 + (i & 1)",
         "i"),
        ("a column is read twice", "key scores", "c / 4 * (kRows * 128) + c % 4 * 32", "c / 4 * (kRows * 128)"),
        ("a row has its neighbour's keys", "key scores", "2 * h + i % 2]; }", "2 * (1 - h) + i % 2]; }"),
    ),
    *_faults(
        "pass1_sm90", HOPPER,
        ("the diagonal lets one key of the future through", "pass 1 state", ">= limit + (causal ? my.first_row",
         "> limit + (causal ? my.first_row"),
        ("the window is forgotten", "pass 1 state", "offset() - window)", "offset())"),
        ("the sum is not rescaled", "pass 1 state", "my.mass[h] * my.rescale_by[h]", "my.mass[h]"),
        ("half of head_dim comes twice", "pass 1 state", "map, full, column, first_key", "map, full, 0, first_key"),
        ("the output is not rescaled", "pass 1 output", "my.acc[d * 4 + e] *= my.rescale_by[e / 2];",
         "my.acc[d * 4 + e] *= 1.f;"),
        ("the output is 1 % too large", "pass 1 output", "0.f : 1.f / final_l[h];\n    if",
         "0.f : 1.01f / final_l[h];\n    if"),
    ),
    *_faults(
        "pass1_sm90", replace(HOPPER, poison=("v", 1390, float("nan"))),
        ("nobody looks for NaN", "pass 1 output", "__any_sync(kFullWarp, carries & 0x80008000u)", "false"),
    ),
    *_faults(
        ("pass1_sm90", *PASS2), replace(HOPPER, softcap=3.0),
        ("scores are not capped", "pass 1 state", "tanh_approx(my.s[i] * my.params.cap_scale)",
         "my.s[i] * my.params.cap_scale"),
    ),
    *_faults(
        PASS2, HOPPER,
        ("rows are swizzled wrongly", "stop", "kRowsStride + row % 8 * 128 + ((c % 8 ^ (row & 7)) << 4)",
         "kRowsStride + row % 8 * 128 + ((c % 8 ^ (row & 3)) << 4)"),
        ("tau is halved", "stop", "sum < tau * my.l", "sum < tau * 0.5f * my.l"),
        ("one row of many decides", "stop", "small &= my.first_row", "small = my.first_row"),
        ("the mass before the tile is not rescaled", "stop", "    my.l[h] *= my.rescale_by[h];\n", ""),
        ("one stop check is not counted", "stop", "params.visited[tile.visited] = stop_checks;",
         "params.visited[tile.visited] = stop_checks - 1;"),
        ("the state's output is not multiplied by l", "output", "Element::high(x) * ml.y", "Element::high(x)"),
        ("the output is not rescaled", "output", "my.acc[d * 4 + e] *= my.rescale_by[e / 2];",
         "my.acc[d * 4 + e] *= 1.f;"),
        ("lse is in units of log2", "lse", " * 0.69314718055994531f", ""),
    ),
    *_faults(
        ("pass2_boxes_sm90", "pass2_boxes_tail_sm90"), BOXES,
        ("a box of values stands in another's place", "output",
         "k_row[i] = v_row[i] = now < 0 && !kPaged ? kPastRows : now;",
         "k_row[i] = now < 0 ? kPastRows : now, v_row[i] = k_row[i] ^ 8;"),
        ("all warps ask for the first one's boxes", "stop",
         "(threadIdx.x / 32 - Traits::kFirstProducer / 32) * kBoxes + ", ""),
        ("queries are those behind them", "stop", "columns * 64, first, head", "columns * 64, first + 1, head"),
        ("the first eight outputs are everybody's", "output", "first + Rows::of_head(key_row)", "first"),
        ("the state's output is not multiplied by l", "output", "Element::high(x[i]) * my.l[i % 2]",
         "Element::high(x[i])"),
    ),
    *_faults(
        "pass2_sm90", HALVES,
        ("the second half has the first one's keys", "stop",
         "my.shared.k[my.k_ring.slot]), 0),\n                                 kHalf *",
         "my.shared.k[my.k_ring.slot]), 0),\n                                 0 *"),
        ("the second half has the first one's values", "output",
         "Traits::kColumnsStride),\n                                 kHalf *",
         "Traits::kColumnsStride),\n                                 0 *"),
        ("a lane keeps the same rows twice", "stop", "key_row + i * kKeptRows;\n      return nth_key",
         "key_row;\n      return nth_key"),
    ),
    *_faults(
        "pass2_boxes_sm90", HALVES_CASES["halves by boxes"],
        ("both warps ask for the first one's boxes", "stop",
         "(threadIdx.x / 32 - Traits::kFirstProducer / 32) * kBoxes + ", ""),
    ),
    *_faults(
        "pass2_sm90", HALVES_CASES["halves of many q tiles"],
        ("a lane has one row of the next q tile twice", "stop",
         "shared.next.row[threadIdx.x - kFirst + i * kThreads]", "shared.next.row[threadIdx.x - kFirst]"),
        ("a lane has one key of the next q tile twice", "stop",
         "shared.next.unit[threadIdx.x - kFirst + i * kThreads]", "shared.next.unit[threadIdx.x - kFirst]"),
    ),
    *_faults(
        "pass2_sm90", replace(HALVES, tau=0.0),
        ("the second half has as many keys as the first", "output",
         "limit - half * Traits::kScoreKeys,", "limit - half / 2 * 2 * Traits::kScoreKeys,"),
    ),
    *_faults(
        "pass2_sm90", replace(HOPPER, block_m=64),  # of four warps that vote
        ("the first warp decides", "stop", "0x0101010101010101ull : 0x01010101ull", "0x0101010101010101ull : 0x01ull"),
    ),
    *_faults(
        "pass2_sm90", replace(HOPPER, head_dim=256),
        ("all rows are swizzled as the first four", "stop", "pass % 2 ? first ^ 4 * 16", "false ? first"),
    ),
    *_faults(
        "pass2_sm90", RISING,
        ("a score above the ceiling is overlooked", "output", "above |= top != highest;", "above |= false;"),
    ),
]  # fmt: skip
for rows_of in (QUERY_FAULTS, TAIL_FAULTS, LEAST_FAULTS, row_faults(ONE_TILE, BOXES, TAIL), order_faults(MEAN, AROUND)):
    FAULTS += [fault for function, case, rows in rows_of for fault in _faults(function, case, *rows)]


@functools.cache
def kernel_of(function: str) -> Kernel:
    return next(kernel for kernel in kernels_for(90) if kernel.function == function)


@functools.cache
def text_of(function: str) -> str:
    return compiler.render(kernel_of(function))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.functions[0]}: {f.name}")
def test_every_fault_has_its_place(fault):
    """Without a GPU: the sources still hold what each fault changes."""
    for function in fault.functions:
        assert fault.plant(text_of(function)) != text_of(function)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.functions[0]}: {f.name}")
def test_a_planted_fault_is_found(fault, monkeypatch):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if fault.path == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")

    good = compiler.render

    def render(kernel):
        return fault.plant(good(kernel)) if kernel.function in fault.functions else good(kernel)

    monkeypatch.setattr(compiler, "render", render)
    monkeypatch.setattr(compiler, "_loaded", {})
    clear_cache()
    try:
        report = run_diff(fault.case, fault.path)
    finally:
        clear_cache()
    found = [row.stage for row in report.rows if not row.ok]
    assert found and found[0] == fault.stage, report.table()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [MEAN, MAX, UNITS, AROUND, ONE_TILE, HOPPER, RISING, HOPPER_UNITS, HOPPER_AROUND, QUERY, QUERY_AROUND, EACH_KEY,
     BYTES, BYTES_OF_EACH_KEY, INTEGERS, INTEGERS_OF_GROUPS, *LEAST_CASES.values(), BOXES, *HALVES_CASES.values()],
    ids=["mean", "max", "units", "around", "one tile", "hopper", "rising", "hopper units", "hopper around", "query",
         "query around", "each key", "bytes", "bytes of each key", "integers", "integers of groups", *LEAST_CASES,
         "boxes", *HALVES_CASES],
)
def test_without_a_fault_none_is_found(case):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    of_hopper = case.head_dim == 128 or case in HALVES_CASES.values()
    is_portable = not of_hopper or case in (INTEGERS, INTEGERS_OF_GROUPS)
    report = run_diff(case, "portable" if is_portable else "auto")
    assert report.ok, report.table()
    assert 0.05 < report.density < 0.95 or case.tau == 0  # some tiles stop, and some keys are skipped
