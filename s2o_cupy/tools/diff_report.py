"""What `diff` has compared: a row for each stage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..problem import Problem
from ..spec import S2OConfig

__all__ = ["DiffReport", "Row", "Rows"]

Array = Any  # numpy.ndarray


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    stage: str
    compared: int  # numbers compared
    different: int  # integers that differ from the reference's, or floats beyond the bound
    worst: float  # the largest difference, as a fraction of what rounding allows; above 1 is a fault
    where: tuple[int, ...]  # its index
    error: float  # rel_l2 of floats; share of different integers
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.worst <= 1  # False for NaN


@dataclass(frozen=True)
class DiffReport:
    """The comparison of every stage. ``ok`` if no stage differs by more than rounding explains."""

    rows: tuple[Row, ...]
    density: float
    problem: Problem
    config: S2OConfig
    path: str
    path_reason: str | None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> str:
        head = f"{'stage':16} {'compared':>12} {'different':>10} {'error':>10} {'of allowed':>10}  worst at"
        lines = [head, "-" * len(head)]
        for row in self.rows:
            mark = "" if row.ok else "  FAULT"
            lines.append(
                f"{row.stage:16} {row.compared:12,} {row.different:10,} {row.error:10.2e} {row.worst:10.3g}  "
                f"{list(row.where)}{mark}{'  ' + row.note if row.note else ''}"
            )
        reason = f" ({self.path_reason})" if self.path_reason else ""
        lines.append(f"path {self.path}{reason}")
        lines.append(f"density {self.density:.4f}; {'all stages agree' if self.ok else 'STAGES DIFFER'}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "where": list(row.where), "ok": row.ok} for row in self.rows]
        return {
            "ok": self.ok,
            "density": self.density,
            "path": self.path,
            "path_reason": self.path_reason,
            "problem": asdict(self.problem),
            "config": asdict(self.config),
            "stages": rows,
        }


@dataclass
class Rows:
    """Collects the report's rows."""

    rows: list[Row] = field(default_factory=list)

    def floats(self, stage: str, got: Array, want: Array, allowed: Array, note: str = "") -> None:
        """|got - want| against ``allowed``; NaN and Inf must stand in the same places."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            difference = np.abs(got - want)
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            part = np.where(same, 0.0, difference / allowed)
            part = np.where(np.isnan(part), np.inf, part)
            finite = np.isfinite(want) & np.isfinite(got)
            norm = np.linalg.norm(want[finite])
            error = np.linalg.norm(difference[finite]) / norm if norm else 0.0
        self._add(stage, part, int((part > 1).sum()), error, note)

    def integers(self, stage: str, part: Array, different: int, note: str = "") -> None:
        """``part`` says by what share of the allowed margin each place is off."""
        self._add(stage, part, different, different / max(1, part.size), note)

    def _add(self, stage: str, part: Array, different: int, error: float, note: str) -> None:
        if part.size == 0:
            self.rows.append(Row(stage, 0, 0, 0.0, (), 0.0, note or "nothing to compare"))
            return
        at = np.unravel_index(int(np.argmax(part)), part.shape)
        where = tuple(int(i) for i in at)
        self.rows.append(Row(stage, part.size, different, float(part[at]), where, float(error), note))
