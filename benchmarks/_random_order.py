"""Pass 2 with key orders drawn at random, stopped at a wanted density: how fast it gathers, whatever the input.

No argument of the library forces an order. The pipeline shows its arrays to an observer after each stage, so one can
write another order between ordering and pass 2, and tau decides where a q tile stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import _common
import numpy as np

from s2o_cupy.spec import Geometry, S2OConfig


class RandomOrders:
    """An observer of `s2o_cupy.cuda.pipeline.run` that gives each (head, segment) a random order of its units of keys.

    Drawn once a round of the workspace and kept, so that repeats time the same work.
    """

    def __init__(self, geometry: Geometry, device: str = "cuda", seed: int = 0) -> None:
        import torch

        self.geometry, self.device = geometry, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.drawn: dict[Any, Any] = {}

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "rank_keys":
            chunk, k_order = arrays["chunk"], arrays["k_order"]
            if chunk not in self.drawn:
                import cupy

                self.drawn[chunk] = cupy.from_dlpack(self.draw(chunk))
            k_order[: chunk.elements] = self.drawn[chunk]
            if "least_keys" in arrays:  # of the order that was found
                arrays["least_keys"][...] = 0

    def draw(self, chunk: Any) -> Any:
        """int32 [chunk.elements], causal: in each row a permutation of its segment's units, then 0."""
        import torch

        order = torch.zeros(chunk.elements, dtype=torch.int32, device=self.device)
        of_heads = order.view(chunk.heads, -1)
        for n in range(chunk.first_segment, chunk.first_segment + chunk.segments):
            begin, count = chunk.place(chunk.first_head, n).start, self.geometry.ranked(n)
            keys = torch.rand((chunk.heads, count), generator=self.generator, device=self.device)
            of_heads[:, begin : begin + count] = keys.argsort(-1)
        return order


def expected_density(tau: float, geometry: Geometry, config: S2OConfig) -> float:
    """Density where every key has the same weight, causal: queries in their own order, stop lag 0.

    A key tile then adds block_n to a sum that began with a row's dense keys, so the first row of a q tile, with the
    fewest, decides: it stops after key tile j, from 0, with block_n < tau * (dense + block_n * j).
    """
    pairs = geometry.dense_pairs()
    for n in range(geometry.segments):
        (first, last), candidates = geometry.queries(n), geometry.candidates(n)
        starts = np.arange(first, last, config.block_m)
        rows = np.minimum(config.block_m, last - starts)
        dense = starts + geometry.offset + 1 - geometry.dense_keys(n)[0]
        j = np.maximum(0, np.floor((1 / tau if tau else math.inf) - dense / config.block_n) + 1)
        pairs += int((rows * np.minimum((j + 1) * config.block_n, candidates)).sum())
    return pairs / geometry.causal_pairs()


def expected_tau(density: float, geometry: Geometry, config: S2OConfig) -> float:
    """The tau whose `expected_density` is nearest to ``density``."""
    return _common.find_tau(
        lambda tau: expected_density(tau, geometry, config), density, rising=False, high=1e3, tolerance=1e-3, steps=40
    )
