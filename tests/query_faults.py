"""Faults for the kernels of ``rank="query"``, as test_faults.py has them: kernels, a case, and rows of name, stage, old
and new text."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import Case

# Several steps of units in and between whole blocks of them, and a last segment of few queries.
QUERY = Case(heads=4, kv_heads=2, seqlen_q=1100, segment=256, block_m=64, block_n=64,
             options={"clusters": 4, "tail": "none"})  # fmt: skip
# Units on three sides of a segment are in no whole block of candidates.
QUERY_AROUND = replace(QUERY, seqlen_q=600, seqlen_k=2000 + 3, is_causal=False)
# Products of 8 bits: several tiles of units, an even number of segments and a short one.
BYTES = Case(heads=4, kv_heads=2, seqlen_q=2600, segment=128, head_dim=128, options={"clusters": 4, "tail": "none"})
# Each key of a unit is a group.
EACH_KEY = replace(QUERY, options={"tail": "none"})
BYTES_OF_EACH_KEY = replace(BYTES, options={"tail": "none"})
# The same by integers.
INTEGERS = replace(BYTES_OF_EACH_KEY, seqlen_q=1100)
INTEGERS_OF_GROUPS = replace(BYTES, seqlen_q=1100)
ZEROS_FIRST = replace(BYTES, arrange="zeros first")
ON_HOPPER = (BYTES, BYTES_OF_EACH_KEY, ZEROS_FIRST)

Rows = tuple[tuple[str, str, str, str], ...]
QUERY_FAULTS: list[tuple[str, Case, Rows]] = [
    (
        "unit_clusters", QUERY,
        (
            ("a mean is half of it", "unit means", "from[e] += x[e] * factor;", "from[e] += x[e] * factor * 0.5f;"),
            ("units of a block stand the other way round", "unit means", "(begin >> g.unit_shift) + u,",
             "(begin >> g.unit_shift) + (units - 1 - u),"),
            ("the last key of a unit is sampled", "sampled keys", "read(x, begin_row);\n      store(p.sampled_keys",
             "read(x, end_row - 1);\n      store(p.sampled_keys"),
            ("every KV head has the first one's keys", "unit means", "(p.k, batch, kv_head % p.kv_heads)",
             "(p.k, batch, 0)"),
            ("the last key is in no group", "groups", "const int mine = each_key ?",
             "const int mine = r == end_row - 1 ? -1 : each_key ?"),
            ("the nearest key is the first centre", "groups",
             "const float d = distance(r, from);\n      if (d > furthest)",
             "const float d = distance(r, from);\n      if (furthest < 0.f || d < furthest)"),
            ("all keys stay with the first centre", "groups", "c == 0 || d < so_far", "c == 0"),
            ("a centre is far from the one before alone", "groups", "if (!nearer) d = so_far;", ";"),
            ("a lane has its own distance", "groups", "found += __shfl_xor_sync(kFullWarp, found, step);", ";"),
            ("a group's sum is divided by all keys", "groups", "size[c] ? 1.f / share : 0.f", "size[c] ? 1.f : 0.f"),
            ("a share is in natural units", "shares", "__log2f(share)", "__logf(share)"),
        ),
    ),
    (
        "unit_clusters", replace(QUERY, options={"unit": 1, "tail": "none"}),
        (("a group without a key has a share", "shares", "__log2f(share) : -infinity()", "__log2f(share) : 0.f"),),
    ),
    (
        "unit_clusters", EACH_KEY,
        (
            ("a key stands in the place of the one beside it", "groups", "each_key ? r - begin_row :",
             "each_key ? r - begin_row ^ 1 :"),
            ("single keys are grouped as others are", "groups", "1 << g.unit_shift == kClusters", "false"),
        ),
    ),
    (
        "query_weights", EACH_KEY,
        (("half of eight groups do not count", "key scores", "other < kLanes; other *= 2", "other < 2; other *= 2"),),
    ),
    (
        "query_weights_sm90", BYTES_OF_EACH_KEY,
        (
            ("half of eight groups do not count", "key scores", "x = shared_out<8>(of_eight, x);", ";"),
            ("one of a thread's two keys does not count", "key scores",
             "larger = Float16::larger_or_nan(d[2 * j], d[2 * j + 1]);", "larger = d[2 * j];"),
            ("keys have the share of a quarter", "key scores", "kClusters == 8 ? -3.f", "kClusters == 8 ? -2.f"),
            ("a quad of tiles comes twice", "key scores", "half ^ 1, quad + 1, !kEachKey",
             "half ^ 1, quad, !kEachKey"),
        ),
    ),
    (
        "unit_rows", QUERY,
        (
            ("a block leaves out its last unit", "block means", "p.leading : kBlockUnits;",
             "p.leading : kBlockUnits - 1;"),
            ("two blocks are exchanged", "block means", "is_centre ? 0 : 1 + block", "is_centre ? 0 : 1 + (block ^ 1)"),
            ("the centre is a sum", "block means", "1.f / p.leading", "1.f"),
            ("sampled keys keep their block's mean", "deviations", "(Element::low(keys[j]) - low)",
             "(Element::low(keys[j]))"),
            ("sampled keys are another block's", "deviations", "(units / kBlockUnits) + block;",
             "(units / kBlockUnits) + (block ^ 1);"),
        ),
    ),
    (
        "unit_rows", BYTES,
        (
            ("the centre is not taken off", "8-bit rows", ": (x[e] - centre[e]) * factor", ": x[e] * factor"),
            ("rows are scaled by more", "8-bit exponents", "kKeyExponent - (longest", "kKeyExponent + 5 - (longest"),
            ("groups are compared with the first one alone", "8-bit exponents", "longest = fmaxf(longest, length)",
             "longest = first_row ? longest : length * 0.01f"),
            ("the last two of four are never kept", "8-bit rows", "both_last = fminf(size[2], size[3]) >",
             "both_last = -infinity() >"),
            ("fours are of neighbours in part", "8-bit rows", "i == 1 ? kHalf - 1 - lane", "i == 1 ? (lane ^ 1)"),
            ("the later of two equal ones is kept", "8-bit rows", "(size[0] >= size[1] || both_first)",
             "(size[0] > size[1] || both_first)"),
            ("choices stand with other columns", "8-bit rows", "lane % 4 * 8;", "(lane % 4 ^ 1) * 8;"),
            ("rows eight apart are exchanged", "8-bit rows", "(four / 4 * 2 + row % 16 / 8) * 4",
             "(four / 4 * 2 + 1 - row % 16 / 8) * 4"),
            ("two groups are exchanged", "8-bit rows", "cluster % 2 * 8", "(1 - cluster % 2) * 8"),
            ("rows are half as long", "8-bit rows", "power_of_two(exponent);", "power_of_two(exponent - 1);"),
            ("shares stand with other rows", "key scores", "share_at(at.row)] = share",
             "share_at(at.row ^ 1)] = share"),
        ),
    ),
    (
        "unit_rows", ZEROS_FIRST,
        (
            ("zeros say how long others are", "8-bit exponents", "longest < kShortest ?", "longest < 0.f ?"),
        ),
    ),
    (
        "unit_rows_int8", INTEGERS_OF_GROUPS,
        (
            ("the centre is not taken off", "8-bit rows", "kIntegers ? x[e] - centre[e]", "kIntegers ? x[e]"),
            ("each row has a step of its own", "8-bit steps", "of_turn[c - at % kClusters]", "of_turn[0]"),
            ("rows eight apart are exchanged", "8-bit rows", "+ row % 16 / 8 * 4;", "+ (1 - row % 16 / 8) * 4;"),
            ("two groups are exchanged", "8-bit rows", "kClusters + cluster) * 8", "kClusters + (cluster ^ 1)) * 8"),
            ("columns four apart are exchanged", "8-bit rows", "to[2] = pack_int8", "to[0] = pack_int8"),
            ("shares stand with other rows", "key scores", "row % 8 * 8 + row / 8;", "row % 8 * 8 + (row / 8 ^ 1);"),
        ),
    ),
    (
        "unit_rows_int8", replace(INTEGERS, poison=("k", 200, float("inf"))),
        (
            ("a row that is not finite has a part in the step", "8-bit steps", "of_row < infinity() ? of_row : 0.f",
             "of_row"),
            ("such a row is a row as others are", "8-bit rows", "share = kShareOfNan;", ";"),
        ),
    ),
    (
        "query_norms", replace(QUERY, seqlen_q=1500, options={"unit": 1, "tail": "none"}),
        (
            ("only the first blocks are sampled", "norms", "r * blocks / kKeys * kOfBlock", "r / kOfBlock * kOfBlock"),
            ("of each block the first key is sampled", "norms", "kOfBlock + r % kOfBlock : r", "kOfBlock : r"),
        ),
    ),
    (
        "query_norms", replace(QUERY, is_causal=False),
        (("without causality blocks before the segment are sampled", "norms",
          "(g.is_causal ? g.dense_begin(segment) >> g.unit_shift : g.units())",
          "(g.dense_begin(segment) >> g.unit_shift)"),),
    ),
    (
        "query_norms", replace(QUERY, scale=3.0),
        (("what varies has no bound", "norms", "half > kMost ?", "false ?"),),
    ),
    (
        "query_norms", QUERY,
        (
            ("single keys score as their mean does", "norms", "m[i][h] + shared.excess[row(i, h)]", "m[i][h]"),
            ("what varies counts in full", "norms", "kLn2 * of_halves", "2.f * kLn2 * of_halves"),
            ("sampled keys are those of the first KV head", "norms", "kv_head) * all_blocks", "0) * all_blocks"),
            ("lanes have their own sampled keys", "norms",
             "sum += __shfl_xor_sync(kFullWarp, sum, 2);\n        if (lane % 4 == 0) shared.excess",
             "if (lane % 4 == 0) shared.excess"),
            ("what pass 1 has found counts for nothing", "norms", "sum += own.y * exp2_approx(of_own - base);", ";"),
            ("it counts in keys, not in units", "norms", "own.x - p.geometry.unit_shift", "own.x"),
            ("a block counts once", "norms", "add_step(rows, kBlockShift", "add_step(rows, 0.f"),
            ("units in no block do not count", "norms",
             "steps + (g.is_causal ? begin % kBlockUnits > 0 : 3)", "steps"),
            ("a norm lacks what other lanes found", "norms",
             "- base);\n        sum += __shfl_xor_sync(kFullWarp, sum, 1);", "- base);"),
        ),
    ),
    (
        "query_norms", replace(QUERY, scale=3.0),  # a single key outweighs the means of all
        (
            ("single keys are no floor", "norms", "shared.largest[r] - p.geometry.unit_shift", "-infinity()"),
            ("it counts in keys, not in units", "norms", "shared.largest[r] - p.geometry.unit_shift",
             "shared.largest[r]"),
            ("only one of a block's keys is one", "norms", "first_end = whole.before * kOfBlock - row,",
             "first_end = whole.before - row,"),
            ("keys are those of the first KV head", "norms", "(of_head * blocks * kOfBlock + row)", "(row)"),
            ("lanes have their own largest", "norms", "const float largest = largest_of_quad(m[i][h]);",
             "const float largest = m[i][h];"),
            ("a query has its neighbour's", "norms", "shared.largest[row(i, h)] =", "shared.largest[row(i, h) ^ 1] ="),
        ),
    ),
    (
        "query_norms", replace(QUERY, scale=0.5),  # units that outweigh the blocks before them
        (("the sum is not rescaled", "norms", "l[i][h] * exp2_approx(m[i][h] - base) + sum", "l[i][h] + sum"),),
    ),
    (
        "query_norms", QUERY_AROUND,
        (
            ("a block counts that is no candidate as a whole", "norms", "before(begin / kBlockUnits),",
             "before((begin + kBlockUnits - 1) / kBlockUnits),"),
            ("units behind a segment do not count", "norms", "min(next, units)", "behind"),
        ),
    ),
    (
        "query_norms", replace(QUERY, seqlen_q=2100, is_causal=False, scale=3.0),
        (
            ("keys behind a segment are no floor", "norms", "end = whole.end * kOfBlock - row;",
             "end = first_end;"),
            ("keys of the segment are", "norms", "second_first = whole.second * kOfBlock - row;",
             "second_first = first_end;"),
        ),
    ),
    (
        "query_norms", BYTES,
        (
            ("the centre's score is left in", "norms", "norm -= centre[i][h];", ";"),
            ("products are scaled by half", "8-bit scales", "power_of_two(exponent + of_keys)",
             "power_of_two(exponent + of_keys - 1)"),
        ),
    ),
    (
        "query_weights", QUERY,
        (
            ("half of the queries do not count", "key scores", "larger_or_nan(s[0][j][e], s[0][j][2 + e]);",
             "s[0][j][e];"),
            ("a share is left out", "key scores", "fmaf(of[0], scale, Float16::low(share))", "of[0] * scale"),
            ("shares are those of a step's first rows", "key scores", "[part * 8 + j * 4 + lane % 4]",
             "[j * 4 + lane % 4]"),
            ("two of four groups do not count", "key scores", "other = 1; other < kLanes;", "other = 1; other < 1;"),
            ("the last queries of a long segment are skipped", "key scores", "begin < queries; begin",
             "begin < queries - Traits::kQueries; begin"),
            ("those before count no more", "key scores", "if (!is_first && stores)", "if (false)"),
            ("every query has the first one's norm", "key scores", "-norms[r] * inverse;",
             "-norms[query(0)] * inverse;"),
            ("a query's columns are mixed up", "key scores", "a[i][c / 2][c % 2 * 2 + h]",
             "a[i][c / 2][h * 2 + c % 2]"),
            ("one warp's queries count", "key scores", "w = 1; w < Traits::kWarps;", "w = 1; w < 1;"),
            ("scores go to the neighbours", "key scores", "step * kUnits + lane / kLanes;",
             "step * kUnits + (lane / kLanes ^ 1);"),
        ),
    ),
    (
        "query_weights_int8", INTEGERS,
        (
            ("half of the queries do not count", "key scores", "eight < Traits::kQueries / 8;",
             "eight < Traits::kQueries / 16;"),
            ("a share is left out", "key scores", "share - smallest)", "-smallest)"),
            ("the smallest norm is left out", "key scores", "share - smallest)", "share)"),
            ("every query has the smallest norm", "key scores", "= norm - least;", "= 0.f;"),
            ("a norm stands with the query beside its own", "key scores", "[threadIdx.x % 2] = shared",
             "[1 - threadIdx.x % 2] = shared"),
            ("norms are cut off too soon", "key scores", "kOrigin - kMostLess));", "kOrigin - 1e3f));"),
            ("columns are read twice", "key scores", "multiply_int8(d[i], rows[i][c], x[c][0], x[c][1], d[i]);",
             "multiply_int8(d[i], rows[i][0], x[0][0], x[0][1], d[i]);"),
            ("columns 32 apart are exchanged", "key scores", "[eighth / 4 % 2 * 2];", "[(1 - eighth / 4 % 2) * 2];"),
            ("a lane has its own columns' maxima", "key scores",
             "x = larger_or_nan(x, __shfl_xor_sync(kFullWarp, x, 2));", ";"),
            ("a unit has its neighbour's step", "key scores", "v * 8 + lane / 4] * step",
             "v * 8 + (lane / 4 ^ 1)] * step"),
            ("scores go to the neighbours", "key scores", "+ v) * 8 + lane / 4;", "+ v) * 8 + (lane / 4 ^ 1);"),
            ("every head has the first one's units", "key scores", "block.kv_head() * Rows::tiles",
             "0 * Rows::tiles"),
            ("every warp has the first one's tiles", "key scores", "Traits::kWarps + warp) * 4",
             "Traits::kWarps) * 4"),
            ("queries are larger than their step says", "key scores", "= __frcp_rn(of_element);",
             "= 1.1f * __frcp_rn(of_element);"),
        ),
    ),
    (
        "query_weights_int8", INTEGERS_OF_GROUPS,
        (
            ("two units of a lane have one's step", "key scores", "+ v * 8 + lane / 4] * step",
             "+ lane / 4] * step"),
            ("two units of a lane begin as one does", "key scores", "i == 0 || (kFirst + i) % kOfUnit == 0",
             "i == 0"),
        ),
    ),
    (
        "query_weights_int8", replace(INTEGERS, head_dim=256),
        (
            ("half of the rows are multiplied", "key scores", "multiply<kSixteens>(best, rows, to_sum);", ";"),
            ("the other half has the first one's rows", "key scores", "Tile::of(kFirst + i, c, lane)",
             "Tile::of(i, c, lane)"),
        ),
    ),
    (
        "query_weights_int8", replace(INTEGERS, scale=-0.3),
        (("the sign of the scale is lost", "key scores", "p.scale_log2 < 0.f ? -inverse : inverse", "inverse"),),
    ),
    (
        "query_weights_int8", replace(INTEGERS, seqlen_q=300, poison=("q", 200, float("inf"))),
        (("a query that is not finite is as others are", "key scores", "not_finite |= shared.not_finite[w] != 0;",
          ";"),),
    ),
    (
        "query_weights_sm90", replace(BYTES, seqlen_q=300, poison=("q", 200, float("inf"))),
        (("a query is NaN where it is not finite alone", "key scores", "if (shared.not_finite[r])", "if (false)"),),
    ),
    (
        "query_weights_sm90", BYTES,
        (
            ("a norm is left out", "key scores", "d[2 * j + h], less[j]);", "d[2 * j + h], j ? less[j] : 0u);"),
            ("half of the queries do not count", "key scores", "j < (s + 1) * kOfSegment; ++j",
             "j < (s + 1) * kOfSegment - kOfSegment / 2; ++j"),
            ("a share is left out", "key scores", "h ? 0x3232 : 0x1010), shared.segments[s].onto)",
             "h ? 0x3232 : 0x1010), h ? 0u : shared.segments[s].onto)"),
            ("columns of a query are another lane's", "key scores", "* p.q.row, lane, g.head_dim)",
             "* p.q.row, lane ^ 1, g.head_dim)"),
            ("the second segment's queries take the first one's place", "key scores",
             "s * Traits::kQueries + r, lane * 8", "r, lane * 8"),
            ("lanes keep their maxima", "key scores", "x = shared_out<1>(of_one, x);", ";"),
            ("two of four groups do not count", "key scores", "x = shared_out<4>(of_four, x);", ";"),
            ("lanes go on with the other tile", "key scores", "has_it ? second : first, other",
             "has_it ? first : second, other"),
            ("a column is read twice", "key scores", "descriptor_at(b, c * 64)", "descriptor_at(b, 0)"),
            ("a segment has its neighbour's scores", "key scores", "s == 0 ? Float16::low(maxima.last)",
             "s == 0 ? Float16::high(maxima.last)"),
            ("a thread has another's choices", "key scores", "Tile::choices_of(threadIdx.x)",
             "Tile::choices_of(threadIdx.x ^ 4)"),
            ("queries are not swizzled", "key scores", "column >> 4 ^ swizzle", "column >> 4"),
            ("every head has the first one's units", "key scores", "(block.kv_head() * supers_of",
             "(0 * supers_of"),
            ("scores go to the neighbours", "key scores", "Row::kept_unit(threadIdx.x % 32);",
             "(Row::kept_unit(threadIdx.x % 32) ^ 1);"),
        ),
    ),
    (
        "query_weights_sm90", replace(BYTES, heads=1, kv_heads=1),  # so few blocks that several share a row
        (
            ("every part has the first one's units", "key scores", "supers_of(g.units()) + first_super)",
             "supers_of(g.units()))"),
            ("every part has the first one's scores", "key scores", "(first_super + quad / (Row::kTiles / kQuad))",
             "(quad / (Row::kTiles / kQuad))"),
        ),
    ),
]  # fmt: skip
