"""What a call computed: tiles visited, stop positions, density, error. Nothing is computed until asked for."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .arrays.frameworks import to_host
from .plan.head_taus import as_float32
from .plan.launch_plan import dense_reason, is_dense
from .problem import Problem
from .spec import Geometry, S2OConfig

__all__ = ["NOTHING_RAN", "Given", "Ran", "S2OStats"]

Ran = tuple[str | None, str | None, str | None]  # path, path_reason and graphs
NOTHING_RAN: Ran = (None, None, None)


class Given(NamedTuple):
    """The q, k and v of a call, which statistics do not keep alive."""

    arrays: tuple[Any, ...]  # weak references
    layout: str

    @classmethod
    def of(cls, arrays: Sequence[Any], layout: str) -> Given | None:
        try:
            return cls(tuple(weakref.ref(x) for x in arrays), layout)
        except TypeError:  # arrays of a framework that has none
            return None


@dataclass(frozen=True, repr=False, eq=False)
class S2OStats:
    """Measurements of one ``s2o_attention`` call.

    Everything but ``density`` stays on the device of the inputs, in their framework. A call without a
    batch axis has batch 1 here.

    Attributes
    ----------
    visited : array, int32, (batch, heads, segments, tiles)
        Key tiles that each tile of ``block_m`` queries visited before it stopped. Tiles are counted in
        the segment's query order; those past the end of the last, shorter segment are 0.
    problem : Problem
        Sizes, dtype, mask and scale of the call.
    config : S2OConfig
        The configuration it ran with; the numbers behind a default tau or an error are in ``tau_per_head``.
    path : str or None
        Which kernels ran, by the name that `S2OConfig.path` has for them, or "numpy", the reference; None where nothing
        did, as there is no query or no key.
    path_reason : str or None
        Why ``config.path`` "auto" took the portable kernels on a GPU that has the Hopper ones. None where it did not,
        on other GPUs, and where ``config.path`` asked for the portable ones.
    graphs : str or None
        "replayed": one CUDA graph stood for the call's launches, as it had come before with the same addresses.
        "launched": it did not, for this is the first such call, or it has few launches. "off: " and the driver's
        message: graphs failed again and again, and calls of this problem are launched one kernel after the other from
        then on. None where no kernel ran.
    """

    visited: Any
    problem: Problem
    config: S2OConfig
    path: str | None
    path_reason: str | None = None
    graphs: str | None = None
    taus: Any = None  # of a config with an error, float32 (batch, heads)
    given: Given | None = field(default=None, compare=False)

    def __copy__(self) -> S2OStats:
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)  # as they are: q, k and v are in this process
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy in another process, which has no q, k and v to look at."""
        return {**self.__dict__, "given": None}

    @property
    def tau_per_head(self) -> Any:
        """The tau that each head ran with, float32 (batch, heads): the config's, or what its error led to. Of the
        default, which falls with the earlier keys, that of the last segment."""
        if self.taus is not None:
            return self.taus
        taus = self.config.taus(self.problem.heads, self.geometry.candidates(self.geometry.segments - 1))
        of_heads = np.array([as_float32(x) for x in taus], np.float32)
        return self._like_visited(np.tile(of_heads, (self.problem.batch, 1)))

    @functools.cached_property
    def error_per_head(self) -> np.ndarray:
        """Estimate of each head's rel_l2 against dense attention, float64 numpy.ndarray (batch, heads).

        Found at the first access from the q, k and v of the call as they then are: `error_per_head` with what each head
        ran with. It costs dense attention and S2O on up to 32 segments, and waits for the device. 0 of a call that was
        plain dense attention.

        Raises
        ------
        ValueError
            q, k or v are no more (nobody else has kept them), the call was not one of `s2o_attention`, or dense
            attention's output is not finite.
        """
        if self.path is None or (self.path != "numpy" and is_dense(self.problem, self.config)):
            return np.zeros((self.problem.batch, self.problem.heads))
        if self.given is None:
            raise ValueError(
                "S2OStats.error_per_head: accepted: statistics of s2o_attention; for a packed or paged call give a "
                "sequence of it to s2o_cupy.tools.error_per_head"
            )
        q, k, v = (x() for x in self.given.arrays)
        if q is None or k is None or v is None:
            raise ValueError(
                "S2OStats.error_per_head: q, k or v of the call are gone; accepted: keep them until it is asked for, "
                "or give them to s2o_cupy.tools.error_per_head"
            )
        # By name: the core imports no tool, and loads this one for who asks.
        error_per_head = importlib.import_module(f"{__package__}.tools.sampled").error_per_head

        p = self.problem
        options: dict[str, Any] = {"scale": p.scale, "softcap": p.softcap, "is_causal": p.is_causal}
        options["layout"] = self.given.layout
        if self.taus is None:
            return error_per_head(q, k, v, self.config, **options).error
        taus, errors = to_host(self.taus).tolist(), []  # sequences have taus of their own
        for b, of_sequence in enumerate(taus):
            at: Any = ... if q.ndim == 3 else slice(b, b + 1)
            found = error_per_head(q[at], k[at], v[at], self.config.with_found_taus(of_sequence), **options)
            errors.append(found.error)
        return np.concatenate(errors)

    @property
    def dense_reason(self) -> str | None:
        """Why the GPU computed plain dense attention, such as ``"seqlen_k is 4,096, and dense_up_to 8,192"``.

        None where it did not, and of the NumPy reference, which always takes S2O's way."""
        return None if self.path in (None, "numpy") else dense_reason(self.problem, self.config)

    @property
    def geometry(self) -> Geometry:
        return self.problem.geometry(self.config)

    @property
    def stop_positions(self) -> Any:
        """Keys visited by each query tile, int32 (batch, heads, segments, tiles): the length of k_order's
        prefix that was read."""
        xp = _namespace(self.visited)
        candidates = self._like_visited(_candidates(self.geometry)[:, None])  # [segments, 1]
        return xp.minimum(self.visited * self.config.block_n, candidates)

    @property
    def density_per_head(self) -> Any:
        """(query, key) pairs computed / pairs of dense attention, float32 (batch, heads)."""
        xp = _namespace(self.visited)
        pairs = max(1, self.geometry.causal_pairs())
        share = _tile_rows(self.geometry, self.config.block_m) / pairs  # [segments, tiles]
        weighted = xp.astype(self.stop_positions, xp.float32) * self._like_visited(share.astype(np.float32))
        return xp.sum(weighted, axis=(-2, -1)) + self.geometry.dense_pairs() / pairs

    @property
    def density(self) -> float:
        """The same over all heads, exact in integers until the last division. Copies ``visited`` to the
        host, so it synchronises with the device. 0.0 if there is nothing to compute."""
        geometry, problem = self.geometry, self.problem
        total = problem.batch * problem.heads * geometry.causal_pairs()
        if total == 0:
            return 0.0
        visited = to_host(self.visited).astype(np.int64)
        keys = np.minimum(visited * self.config.block_n, _candidates(geometry)[:, None])
        pass2 = int((keys * _tile_rows(geometry, self.config.block_m)).sum())
        return (problem.batch * problem.heads * geometry.dense_pairs() + pass2) / total

    def __repr__(self) -> str:
        """Begins with the density, for which it synchronises with the device; without where that cannot be, as while a
        graph is captured or where arrays are gone."""
        from .arrays.frameworks import framework_of

        try:
            framework = framework_of("visited", self.visited)
            is_captured = framework.describe(self.visited).device.kind == "cuda" and framework.is_capturing()
            density = "" if is_captured else f"density: {self.density:.4g}, "
        except Exception:  # of whatever framework: what is printed while something else fails must not fail itself
            density = ""
        sizes = "x".join(str(n) for n in self.problem.visited_shape(self.config))
        path = f"path: {self.path}" + (f" ({self.path_reason})" if self.path_reason else "")
        if (self.graphs or "").startswith("off"):
            path += f", graphs {self.graphs}"
        if self.dense_reason:
            path += f", dense: {self.dense_reason}"
        visited = f"visited: {sizes} [batch, heads, segments, tiles]"
        return f"S2OStats({density}{visited}, {path}, {self.problem}, {self.config})"

    def _like_visited(self, host: np.ndarray) -> Any:
        """A host array in the framework and on the device of ``visited``."""
        from array_api_compat import device

        return _namespace(self.visited).asarray(host, device=device(self.visited))


def _namespace(array: Any) -> Any:
    from array_api_compat import array_namespace

    return array_namespace(array)


def _candidates(geometry: Geometry) -> np.ndarray:
    """Keys that pass 2 may visit, int32 [segments]."""
    return np.array([geometry.candidates(n) for n in range(geometry.segments)], np.int32)


def _tile_rows(geometry: Geometry, block_m: int) -> np.ndarray:
    """Queries of each tile, int64 [segments, tiles]: block_m but for the last ones."""
    queries = [geometry.queries(n) for n in range(geometry.segments)]
    lengths = np.array([end - begin for begin, end in queries], np.int64)  # [segments]
    starts = np.arange(geometry.block_count(block_m), dtype=np.int64) * block_m  # [tiles]
    return np.clip(lengths[:, None] - starts, 0, block_m)
