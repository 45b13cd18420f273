"""What a way to score keys is: its arrays in the workspace and its launches, of one setting.

Another one is a definition in reference/ordering.py; a row of _BY_RANK in spec/config.py, which names a file here; and
that file, with its class as ORDER.
Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...plan.build import Array, Builder, Launch
from ...plan.kernels import Inputs, Kernel, Path
from ...plan.method import Setting
from ...plan.rounds import Chunk
from ...spec import LOG2E

__all__ = ["SMALLEST_SCALE", "Order"]

SMALLEST_SCALE = 1e-30  # by which query_weights divides, and times 0 what unit_weights leaves out would be NaN


class Order:
    """A way to score the candidates of segments."""

    largest_grid = 0  # blocks of its largest launch, those of a round apart

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    def kernel(self) -> Kernel:
        """What writes scores."""
        raise NotImplementedError

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        """Kernels that a call with such inputs may choose."""
        raise NotImplementedError

    def arrays(self) -> list[Array]:
        """What it has in the workspace beside scores and orders."""
        return []

    def arrays_before_rounds(self) -> list[Array]:
        """The arrays of these that it needs only until the first round."""
        return []

    def before_rounds(self, build: Builder) -> list[Launch]:
        """What it launches once, after pass 1."""
        return []

    def scores(self, build: Builder, chunk: Chunk, values: Mapping[str, Any]) -> Launch:
        """What writes the scores of a round. ``values``: parameters that all ways share."""
        raise NotImplementedError

    @property
    def scale_log2(self) -> float:
        """log2(e) times the magnitude of the scale."""
        return abs(self.setting.problem.scale) * LOG2E

    @property
    def signed_scale_log2(self) -> float:
        """The same with its sign, and never 0."""
        return math.copysign(max(self.scale_log2, SMALLEST_SCALE), self.setting.problem.scale)
