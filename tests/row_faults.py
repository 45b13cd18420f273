"""Faults of rows that stand as they lie, as test_faults.py has them: of segments that are one q tile."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import Case
from query_faults import Rows


def row_faults(one_tile: Case, boxes: Case, tail: Case) -> list[tuple[str | tuple[str, ...], Case, Rows]]:
    """``one_tile``, ``boxes``: of segments of one q tile, the second for the copy engine. ``tail``: of longer ones."""
    boxes_of_many = replace(boxes, heads=16, tau=0.0)  # more q tiles than blocks: what a block has next is looked up
    return [
        (
            "pass2", one_tile,
            (
                ("all rows are one query", "stop", "begin + (ordered ? order[r] : r);",
                 "begin + (ordered ? order[r] : 0);"),
            ),
        ),
        (
            ("pass2_boxes_sm90", "pass2_boxes_tail_sm90"), boxes_of_many,
            (
                ("all rows of the next q tile are one query", "output",
                 "const Geometry&, const int* order, int r) { return order ? order[r] : r; }",
                 "const Geometry&, const int* order, int r) { return order ? order[r] : 0; }"),
            ),
        ),
        (
            "add_tail", replace(tail, segment=64),
            (("all rows are one query", "tail output", "work.q_order[i] : i)", "work.q_order[i] : 0)"),),
        ),
    ]  # fmt: skip
