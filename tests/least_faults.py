"""Faults for the keys that q tiles wait for, as test_faults.py has them: kernels, a case, and rows of name, stage, old
and new text."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import Case
from query_faults import QUERY_AROUND, Rows

PASS2 = "pass2_sm90", "pass2_tail_sm90"  # with a tail diff runs both
BY_HEAD = (0.01, 0.5, 0.0, 0.1)  # of four heads
# Q tiles that would stop before all that weighs much.
LEAST = Case(heads=4, kv_heads=2, seqlen_q=1400, segment=256, block_m=64, block_n=64, tau=0.1, scale=0.25)
HOPPER_LEAST = Case(heads=4, kv_heads=2, seqlen_q=2600, segment=256, head_dim=128, tau=0.1, scale=0.5)
LEAST_BY_HEAD = replace(LEAST, tau=BY_HEAD)
# Others that stop before, after several tiles in a row, and not after as many with one that gains between them.
ROW = replace(LEAST, seqlen_q=2600, tau=0.05, scale=0.5)
HOPPER_ROW = replace(HOPPER_LEAST, seqlen_q=4000, tau=0.2, scale=2.0)
WITH_WINDOW = replace(LEAST, seqlen_q=700, options={"window": 30})  # and keys before it that are near, too
BYTES_LEAST = replace(HOPPER_LEAST, seqlen_q=1100, segment=128)
# Long enough that a part of their keys fills more tiles than the fewest.
LONG_ROW = replace(ROW, heads=2, kv_heads=1, seqlen_q=7000, segment=1024)
HOPPER_LONG_ROW = replace(HOPPER_ROW, heads=2, kv_heads=1, seqlen_q=13000, segment=1024)

LEAST_CASES = {
    "least": LEAST, "hopper least": HOPPER_LEAST, "least by head": LEAST_BY_HEAD, "row": ROW, "hopper row": HOPPER_ROW,
    "with window": WITH_WINDOW, "bytes least": BYTES_LEAST, "long row": LONG_ROW, "hopper long row": HOPPER_LONG_ROW,
}  # fmt: skip

LEAST_FAULTS: list[tuple[str | tuple[str, ...], Case, Rows]] = [
    (
        PASS2, HOPPER_LEAST,
        (
            ("a tile waits for nothing", "stop", "visited < my.shared.least_keys[nth % kPlaces]", "false"),
            ("it waits one tile longer", "stop", "in_a_row >= my.shared.patience", "in_a_row > my.shared.patience"),
            ("it stops one tile before", "stop", "static_cast<int>(n + 1) * kStop",
             "static_cast<int>(n + 2) * kStop"),
            ("what a q tile has to visit is not announced", "stop",
             "shared.least_keys[place] = shared.next.least_keys;", "shared.least_keys[place] = 0;"),
            ("all q tiles have to visit what the first has to", "stop", "p.least_keys[order_row(p)]",
             "p.least_keys[0]"),
        ),
    ),
    (
        "pass2", LEAST,
        (
            ("a tile waits for nothing", "stop", " && has_least(visited));", ");"),
            ("it waits for all that weighs much", "stop", "in_a_row >= shared.patience || (small", "(small"),
            ("it stops a step before", "stop", "visited * params.steps_per_tile * kStep >=",
             "(visited + 1) * params.steps_per_tile * kStep >="),
            ("all q tiles have to visit what the first has to", "stop", "p.least_keys[order_row(p)]",
             "p.least_keys[0]"),
        ),
    ),
    (
        PASS2, HOPPER_ROW,
        (
            ("tiles between which one gains are in a row", "stop", "in_a_row[warp]) + 1 : 0;",
             "in_a_row[warp]) + 1 : my.shared.in_a_row[warp];"),
        ),
    ),
    (
        "pass2", ROW,
        (
            ("tiles between which one gains are in a row", "stop", "small ? counter + 1.f : 0.f;",
             "counter + small;"),
        ),
    ),
    (
        "pass2", LONG_ROW,
        (
            ("as few tiles in a row end it however many keys there are", "stop",
             "max(least, keys / (spec::kPatienceParts * of_check))", "least"),
        ),
    ),
    (
        "pass2", ROW,
        (("tiles of near keys count as others do", "stop", " + spec::kNearKeys / of_check", ""),),
    ),
    (
        "query_weights", WITH_WINDOW,
        (
            ("near keys have their estimate", "key scores", "is_near(p, segment, at) ? infinity() : x", "x"),
            ("keys are near the window", "key scores", "p.geometry.query_begin(segment) + p.geometry.offset()",
             "p.geometry.dense_begin(segment)"),
            ("one unit less is near", "key scores", "unit >= max(0, keys)", "unit > max(0, keys)"),
        ),
    ),
    (
        "query_weights", QUERY_AROUND,
        (("keys are near where none is to be", "key scores", "return p.near_keys && ", "return "),),
    ),
    (
        "query_weights_int8", BYTES_LEAST,
        (("near keys have their estimate", "key scores", "if (is_near(p, segment, unit)) x = infinity();", ";"),),
    ),
    (
        "query_weights_sm90", BYTES_LEAST,
        (
            ("near keys have their estimate", "key scores", "near ? infinity() : x", "x"),
            ("both segments have one's near keys", "key scores", "is_near(p, block.segment(s), unit)",
             "is_near(p, block.segment(0), unit)"),
        ),
    ),
    (
        PASS2, HOPPER_LONG_ROW,
        (
            ("as few tiles in a row end it however many keys there are", "stop",
             "patience(shared.next.keys, kStopCheckKeys)", "spec::kPatience"),
        ),
    ),
    (
        "key_order_short", LEAST_BY_HEAD,
        (
            ("units count, not keys", "least keys", "min(heavy, row.count) << p.geometry.unit_shift", "heavy"),
            ("one warp's alone count", "least keys", "heavy += shared.heavy[w];", "heavy = shared.heavy[w];"),
            ("half of the scores count", "least keys", " + !(Float16::high(scores) < least)", ""),
            ("all of tau is asked for", "least keys", " / spec::kLeastParts", ""),
            ("every head has the first one's tau", "least keys", "p.taus[row.head]", "p.taus[0]"),
            ("a row has its neighbour's", "least keys", "p.least_keys[row.pair] = min",
             "p.least_keys[row.pair ^ 1] = min"),
        ),
    ),
]
