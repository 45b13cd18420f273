"""benchmarks/scaling.py: the calls by which it searches for a tau."""

import benchmark_modules as benchmark_modules
import numpy as np
import pytest
from conftest import has_gpu

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan import launch_plan

# isort: split
import scaling


@pytest.mark.parametrize(
    ("given", "searched"), [({}, 0), ({"dense_up_to": 300}, 0), ({"dense_up_to": 0}, 0), ({"dense_up_to": 400}, 400)]
)
def test_a_search_is_as_sparse_as_the_whole_call(given, searched, monkeypatch):
    """Though a sampled segment has few enough keys for a dense call."""
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", 256)
    monkeypatch.setattr(launch_plan, "DENSE_HEADS", 1)  # as many as there are
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 384, 16), np.float32)
    asked = []

    def attention(*arrays, config):
        asked.append(config.dense_up_to)
        return s2o_attention(*arrays, config=config)

    sample = scaling.Sample(q, k, v, 128, 2)
    monkeypatch.setattr(scaling, "s2o_attention", attention)
    sample.errors_at(S2OConfig(**given))
    assert asked == [searched] * len(sample.ranges)


def test_lengths_by_device():
    """The reference takes minutes where a GPU takes milliseconds."""
    assert scaling.parse(["--device", "cpu"]).lengths == [2048, 4096, 8192]
    assert scaling.parse(["--device", "cpu", "--lengths", "512"]).lengths == [512]
    if has_gpu():
        assert scaling.parse(["--device", "cuda"]).lengths == [8192 << i for i in range(8)]
    assert "2048, 4096, 8192" in scaling.LENGTHS_HELP and scaling.LENGTHS["cuda"][-1] == 1 << 20
