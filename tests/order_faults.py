"""Faults of kernels that put scores in order, as test_faults.py has them. The order stays a permutation, so that pass 2
reads nothing but keys."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import Case
from query_faults import Rows


def order_faults(mean: Case, around: Case) -> list[tuple[str | tuple[str, ...], Case, Rows]]:
    """``mean``: of some hundred keys. ``around``: units stand before a segment and after it, the last of them short."""
    # More keys than are sorted at once.
    long = Case(seqlen_q=300, seqlen_k=17_503, segment=256, block_m=64, block_n=64, tau=0.01, options={"unit": 1})
    return [
        (
            "key_order_short", around,
            (
                ("the short unit is the one before", "key order", "= row.short_unit;", "= row.short_unit - 1;"),
            ),
        ),
        (
            "key_order_short", mean,
            (
                ("buckets are twice as wide", "key order", "kBuckets - 2.f,", "kBuckets / 2 - 2.f,"),
                ("distances are of half the scores", "key order", ': "=r"(x) : "r"(high), "r"(scores)',
                 ': "=r"(x) : "r"(high), "r"(scores & 0xffffu | scores << 16)'),
                ("threads sort each other's candidates", "key order", "(chunk * (kOfThread / 4) + i / 4)",
                 "((chunk ^ 1) * (kOfThread / 4) + i / 4)"),
                ("only one digit is sorted", "key order",
                 "count<kHighDigitShift>(items);\n    find_places();\n    put<kHighDigitShift",
                 "count<kBucketShift>(items);\n    find_places();\n    put<kBucketShift"),
                ("the range leaves out a warp", "key order", "int w = 0; w < kWarps; ++w) range.join",
                 "int w = 1; w < kWarps; ++w) range.join"),
                ("neighbours are written the other way round", "key order", "row.key(index_of(shared.radix.items[i]))",
                 "row.key(index_of(shared.radix.items[i ^ 1]))"),
            ),
        ),
        (
            "key_order_whole", replace(long, seqlen_k=9503),
            (
                ("the range is of half of the warps", "key order", "w < kWarps; ++w) range", "w < 8; ++w) range"),
            ),
        ),
        (
            "key_order_head", long,
            (
                ("entries of the order are exchanged", "key order", "found[i / 2] >> i % 2 * 16",
                 "found[i / 2] >> (i + 1) % 2 * 16"),
            ),
        ),
        (
            "key_strata", long,
            (
                ("levels are twice as wide", "key order", "kBuckets - 2.f,", "kBuckets / 2 - 2.f,"),
                ("halves of a stratum are not merged", "key order", "run < kLanes; run *= 2",
                 "2 * run < kLanes; run *= 2"),
                ("a step of a lane's sort is left out", "key order", "int i = k % p; i + k < kOfLane;",
                 "int i = k % p; i + 2 * k < kOfLane;"),
                ("lanes keep the wrong half", "key order", "negated(theirs_b)", "theirs_b"),
                ("swapped layers have each other's levels", "key order", "index, 0x0424)", "index, 0x2404)"),
                ("a range is half of the other stratum's", "key order", "range.join(swapped.swapped());",
                 "range.join(swapped);"),
                ("all layers begin alike", "key order", "(pair < shift ? pair - shift + pairs : pair - shift)", "pair"),
                ("places of strata are exchanged", "key order", "make_int4(key(0), key(1),",
                 "make_int4(key(1), key(0),"),
                ("the head of the order has its neighbours' scores", "key order",
                 "make_uint2(score(0) | score(1) << 16,", "make_uint2(score(1) | score(0) << 16,"),
                ("what comes after the last whole layer is dealt the other way round", "key order",
                 "found = make_uint4(swapped", "if (false) found = make_uint4(swapped"),
                ("a key that is not there is taken", "key order", "if (2 * e + 1 >= present)", "if (2 * e >= present)"),
            ),
        ),
        (
            "key_middle", replace(long, seqlen_k=263_003, head_dim=8),
            (
                ("another row's scores are taken", "key order", "{p.middle_scores + row.row *",
                 "{p.middle_scores + (row.row ^ 1) *"),
            ),
        ),
    ]  # fmt: skip
