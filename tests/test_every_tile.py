"""What a dense call says that it visited: written by a kernel, on the stream and into the graph of the call."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL, has_gpu

from s2o_cupy import S2OConfig
from s2o_cupy.caches import clear_cache
from s2o_cupy.plan.every_tile import KERNEL, every_tile
from s2o_cupy.problem import Problem

CASES = {
    "causal": (Problem(2, 3, 1, 700, 700, 64, "bfloat16", True, 0.1), SMALL),
    "more keys": (Problem(1, 2, 2, 130, 1003, 64, "bfloat16", True, 0.1), SMALL),
    "fewer keys": (Problem(1, 2, 2, 700, 130, 64, "bfloat16", True, 0.1), SMALL),
    "a window": (Problem(1, 2, 2, 700, 700, 64, "bfloat16", True, 0.1), S2OConfig(segment=128, window=200)),
    "an endless window": (Problem(1, 2, 2, 700, 700, 64, "bfloat16", True, 0.1), S2OConfig(segment=128, window=2**40)),
    "all to all": (Problem(1, 2, 2, 700, 650, 64, "bfloat16", False, 0.1), S2OConfig(segment=256, block_n=192)),
}


def expected(problem, config):
    """int32 [batch, heads, segments, tiles]"""
    geometry = problem.geometry(config)
    full = np.zeros(problem.visited_shape(config), np.int32)
    for n in range(geometry.segments):
        begin, end = geometry.queries(n)
        full[:, :, n, : -(-(end - begin) // config.block_m)] = -(-geometry.candidates(n) // config.block_n)
    return full


@pytest.mark.parametrize(("problem", "config"), CASES.values(), ids=list(CASES))
def test_the_launch(problem, config):
    launch = every_tile(problem, config.of_pass)
    full = expected(problem, config)
    params = launch.params
    assert (launch.kernel, params["count"], params["tiles"]) == (KERNEL, full.size, full.shape[-1])
    assert 0 <= launch.blocks * KERNEL.threads - full.size < KERNEL.threads
    assert params["visited"] == 0  # filled in at the call


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
@pytest.mark.parametrize(("problem", "config"), CASES.values(), ids=list(CASES))
def test_what_is_written(problem, config):
    import cupy

    from s2o_cupy.cuda import pipeline

    full = expected(problem, config)
    padded = cupy.full(full.size + 64, -7, np.int32)
    pipeline.write_every_tile(padded.data.ptr, problem, config.of_pass, cupy.cuda.get_current_stream().ptr)
    assert (padded[: full.size].get().reshape(full.shape) == full).all()
    assert (padded[full.size :] == -7).all()


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_a_graph_of_the_caller_s_needs_no_memory_of_ours():
    """It is replayed after everything that was remembered is forgotten."""
    import cupy

    from s2o_cupy.cuda import pipeline

    problem, config = CASES["more keys"]
    visited = cupy.zeros(problem.visited_shape(config), np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    pipeline.write_every_tile(visited.data.ptr, problem, config.of_pass, stream.ptr)  # loads the kernel
    with stream:
        stream.begin_capture()
        pipeline.write_every_tile(visited.data.ptr, problem, config.of_pass, stream.ptr)
        graph = stream.end_capture()
        visited.fill(-7)
        clear_cache()
        cupy.get_default_memory_pool().free_all_blocks()
        graph.launch(stream)
    stream.synchronize()
    assert (visited.get() == expected(problem, config)).all()
