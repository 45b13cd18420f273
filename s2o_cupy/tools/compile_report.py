"""What `s2o compile` tells of the kernels that it has compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..cuda.compiler import CompiledKernel

__all__ = ["is_faulty", "rows_of", "table"]


def rows_of(compiled: Iterable[CompiledKernel]) -> list[dict[str, Any]]:
    """A row for each kernel, as --json writes it."""
    return [
        {
            "name": kernel.name,
            "arch": kernel.arch,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": kernel.shared_bytes,
            "warnings": list(kernel.warnings),
            "seconds": round(kernel.seconds, 3),
        }
        for kernel in compiled
    ]


def is_faulty(row: dict[str, Any]) -> bool:
    """Whether registers were spilled, or the compiler warned."""
    return bool(row["spill_bytes"] or row["warnings"])


def table(rows: list[dict[str, Any]], every: bool) -> str:
    """A line for each architecture, then one for each kernel at fault, or for every kernel."""
    lines = [f"{'arch':<8} {'kernels':>8} {'registers':>10} {'shared B':>9} {'faults':>7} {'seconds':>8}"]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        group = [row for row in rows if row["arch"] == arch]
        most = {key: max(row[key] for row in group) for key in ("registers", "shared_bytes")}
        lines.append(
            f"{arch:<8} {len(group):>8} {most['registers']:>10} {most['shared_bytes']:>9} "
            f"{sum(map(is_faulty, group)):>7} {sum(row['seconds'] for row in group):>8.1f}"
        )
    lines.append("registers and shared memory: the most of any kernel; faults: kernels with spills or warnings")
    listed = [row for row in rows if every or is_faulty(row)]
    if listed:
        width = max(len(row["name"]) for row in listed)
        lines += [
            "",
            f"{'kernel':<{width}}  {'arch':<8} {'registers':>9} {'spill B':>8} {'shared B':>9} {'seconds':>8}",
        ]
    for row in listed:
        lines.append(
            f"{row['name']:<{width}}  {row['arch']:<8} {row['registers']:>9} {row['spill_bytes']:>8} "
            f"{row['shared_bytes']:>9} {row['seconds']:>8.2f}"
        )
        lines += [f"    warning: {warning}" for warning in row["warnings"]]
    return "\n".join(lines)
