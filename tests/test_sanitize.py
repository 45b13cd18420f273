"""The checks of sanitize.py that can run without a GPU: on NumPy arrays, or with the definition in a kernel's place."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest
import sanitize
from conftest import DEVICES
from pretended import array_at

from s2o_cupy.caches import clear_cache
from s2o_cupy.plan import collecting
from s2o_cupy.plan import launch_plan as plan
from s2o_cupy.reference import s2o
from s2o_cupy.reference.lists import KeyLists, attend_lists


@pytest.mark.parametrize("paged", sanitize.PAGED, ids=str)
def test_ragged_queries(paged):
    assert sanitize.ragged_differing(DEVICES["cpu"], *paged) == []


class OnGpu(np.ndarray):
    """What of a CuPy array the checks use."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


def elements(operand, dtype):
    return array_at(operand.pointer, np.uint16, operand.shape, operand.strides).view(dtype)


def rows_of_pages(cache, paging, batch, seqlen):
    """[batch, kv_heads, seqlen, head_dim] of a cache [pages, kv_heads, page_size, head_dim]."""
    table = array_at(paging.pointer, np.int32, (batch, paging.stride))
    page, row = np.divmod(np.arange(seqlen), paging.page_size)
    return np.stack([cache[entries[page], :, row].swapaxes(0, 1) for entries in table])


@pytest.fixture
def launched(monkeypatch):
    """A module for CuPy, and for a launch the definition by the lists at the addresses given; of each list's keys the
    share ``launched.share`` is read."""
    found = types.SimpleNamespace(share=1.0)

    def launch(call, lists, shape, config, *, stream, state, skips):
        assert state == 0 and skips == (0, 0)
        operands, lse, visited, problem, paging = call
        dtype = np.dtype(getattr(ml_dtypes, problem.dtype, problem.dtype))
        q, k, v, out = (elements(x, dtype) for x in operands)
        if paging is not None:
            k, v = (rows_of_pages(x, paging, problem.batch, problem.seqlen_k) for x in (k, v))
        of_lists = shape.lists_shape(problem, config.block_m)
        begins, keys = (array_at(x, t, of_lists) for x, t in ((lists.begins, np.int64), (lists.keys, np.int32)))
        entries = array_at(lists.entries, np.int32, (int((begins + -(-keys // shape.unit)).max()),))
        read = KeyLists(entries, begins, (keys * found.share).astype(np.int32), shape.unit)
        result, tiles = attend_lists(*(x.astype(np.float64) for x in (q, k, v)), read, block_m=config.block_m)
        out[...], array_at(lse, np.float32, q.shape[:3])[...] = s2o.finish(result)
        array_at(visited, np.int32, tiles.shape)[...] = tiles
        return types.SimpleNamespace(path=config.path)

    pytest.importorskip("cupy")
    import s2o_cupy.cuda.lists

    on_gpu = lambda make: lambda *x, **options: make(*x, **options).view(OnGpu)  # noqa: E731
    stream = types.SimpleNamespace(ptr=0)
    fake = types.ModuleType("cupy")
    fake.__dict__.update(
        {name: on_gpu(getattr(np, name)) for name in ("asarray", "full")},
        asnumpy=np.asarray, cuda=types.SimpleNamespace(get_current_stream=lambda: stream),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(s2o_cupy.cuda.lists, "attend_lists", launch)
    return found


@pytest.mark.parametrize(("case", "unit", "page_size"), sanitize.LISTED, ids=str)
def test_lists(launched, case, unit, page_size):
    assert sanitize.wrong_by_random_lists(case, "hopper", unit, page_size) == []
    launched.share = 0.5
    assert sanitize.wrong_by_random_lists(case, "hopper", unit, page_size) == ["o", "lse"]


def test_both_paths_have_all_checks(monkeypatch):
    monkeypatch.setattr(sanitize, "has_hopper", lambda: True)
    for module, name in ((plan, "COLLECT_ROWS"), (collecting, "COLLECT_ROWS"), (collecting, "COLLECT_PAIRS")):
        monkeypatch.setattr(module, name, getattr(module, name))  # checks() changes it
    found = list(sanitize.checks())
    for kind in ("Case(", "in pages", "packed", "ragged queries", "lists of units", "S2O by lists", "dense, in small"):
        assert {path for path, name, _ in found if name.startswith(kind)} == {"portable", "hopper"}, kind
    collected = [(path, name) for path, name, _ in found if "collected" in name]
    assert len(collected) == 2 and {path for path, _ in collected} == {"hopper"}
    clear_cache()
