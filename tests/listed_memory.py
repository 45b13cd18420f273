"""What the kernels read of lists, by the addresses of raw_kernels/common/listed_rows.cuh: no index of NumPy's stands
between, so that arrays in another order of memory, or lists that lie elsewhere, show without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from s2o_cupy.plan.schedule import ScheduleShape
from s2o_cupy.problem import Problem


class ListedMemory:
    """Lists as they lie in memory, and ListedRows of one launch for all heads and segments."""

    def __init__(
        self, problem: Problem, shape: ScheduleShape, block_m: int, entries: Any, begins: Any, keys: Any
    ) -> None:
        shape.check(problem)
        assert begins.shape == keys.shape == shape.lists_shape(problem, block_m)
        assert (entries.dtype, begins.dtype, keys.dtype) == (np.int32, np.int64, np.int32)
        self.entries, self.begins, self.keys = (x.ravel(order="K") for x in (entries, begins, keys))
        _, _, self.segments, self.tiles = shape.visited_shape(problem, block_m)
        self.params = shape.params(problem)

    def positions(self, head: int, segment: int, tile: int) -> Any:
        """int32 [C], as the kernels compute them: the keys that a q tile reads, in turn; ``head``: of all batches."""
        of_segment = head // self.params["shared_heads"] * self.segments + segment
        at = of_segment * self.tiles + tile if self.params["per_tile"] else of_segment
        i = np.arange(self.keys[at])
        places = self.begins[at] + (i >> self.params["unit_shift"])
        assert (places < len(self.entries)).all()
        of_units = self.entries[places] << np.int32(self.params["unit_shift"])
        return of_units + (i & self.params["unit_mask"]).astype(np.int32)
