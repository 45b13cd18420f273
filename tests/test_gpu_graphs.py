"""What calls say of CUDA graphs, on a GPU. On a CUDA that only takes notes: test_graphs.py."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL, has_gpu

from s2o_cupy import s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import graphs
from s2o_cupy.tools import info

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]


@pytest.fixture
def call(qkv):
    """call() -> (o's bytes, stats.graphs) of one call on the same arrays each time."""
    import cupy

    q, k, v = (cupy.asarray(x.astype(np.float16)) for x in qkv(700))
    out = cupy.empty_like(q)

    def call():
        _, stats = s2o_attention(q, k, v, config=SMALL, out=out, return_stats=True)
        del _
        return out.get().tobytes(), stats.graphs

    clear_cache()
    yield call
    clear_cache()


def test_a_call_that_comes_again_is_replayed(call):
    """The pool gives the same memory to the statistics and the workspace of each."""
    found = [call() for _ in range(4)]
    assert [said for _, said in found] == ["launched", "replayed", "replayed", "replayed"]
    assert len({bits for bits, _ in found}) == 1
    clear_cache()
    assert call() == (found[0][0], "launched")


def test_graphs_that_always_fail_are_off_and_results_the_same(call, monkeypatch):
    expected, _ = call()

    def capture(self, stream, launch):
        raise RuntimeError("no memory for a graph")

    clear_cache()
    with monkeypatch.context() as patch:
        patch.setattr(graphs.GraphCache, "_capture", capture)
        found = [call() for _ in range(2 * graphs.ATTEMPTS)]
    assert [said for _, said in found[:-1]] == ["launched"] * (2 * graphs.ATTEMPTS - 1)
    assert call()[1] == found[-1][1] == "off: no memory for a graph"
    assert {bits for bits, _ in found} == {expected}
    clear_cache()
    assert [call()[1], call()[1]] == ["launched", "replayed"]


def test_info_says_that_graphs_are_usable():
    assert info.gather()["cuda_graphs"] == "usable"
    assert "CUDA graphs" in info.table(info.gather())
