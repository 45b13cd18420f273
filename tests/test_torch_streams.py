"""What PyTorch's allocator is told of a given stream; on a GPU, that streams may end before the tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import has_gpu, spin

import s2o_cupy
from s2o_cupy.arrays import torch_streams

torch = pytest.importorskip("torch")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (has_gpu() and torch.cuda.is_available()), reason="no GPU that PyTorch and CuPy can use"),
]
OWN, FOREIGN = 35, 94_000_000_016  # numbers of streams: odd of PyTorch's, a handle of another's


class Stream:
    """As much of torch.cuda.Stream as is used."""

    def __init__(self, stream_id):
        self.stream_id, self.device_index, self.waited_for = stream_id, 0, []

    def record_event(self):
        return f"all on {self.stream_id}"

    def wait_event(self, event):
        self.waited_for.append(event)


@pytest.fixture
def told(monkeypatch):
    """told(stream, capturing=False) -> the stream that the allocator then remembers of each of two tensors."""
    lasting = Stream(2)
    monkeypatch.setattr(torch_streams, "_lasting_stream", lambda device: lasting)

    def tell(stream, capturing=False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        remembered = []
        tensors = [SimpleNamespace(record_stream=remembered.append)] * 2
        torch_streams.in_use_until_now(tensors, stream)
        assert remembered[0] is remembered[1]
        return remembered[0]

    return tell


@pytest.mark.parametrize("number", [0, OWN])
def test_a_stream_of_pytorch_is_remembered_itself(told, number):
    stream = Stream(number)
    assert told(stream) is stream


def test_another_stream_is_waited_for_by_one_that_lasts(told):
    lasting = told(Stream(FOREIGN))
    assert lasting.stream_id == 2
    assert lasting.waited_for == [f"all on {FOREIGN}"]


def test_a_capturing_stream_is_remembered_itself(told):
    """A wait for it would belong to the graph."""
    stream = Stream(FOREIGN)
    assert told(stream, capturing=True) is stream


DESTROYED = """
import cupy, torch
from s2o_cupy import S2OConfig, s2o_attention
q = torch.randn(1, 4, 2000, 64, device="cuda", dtype=torch.float16)
k, v, out = q.clone(), q.clone(), torch.empty_like(q)
for _ in range(40):
    s2o_attention(q, k, v, config=S2OConfig(dense_up_to=0), out=out, stream=cupy.cuda.Stream(non_blocking=True))
torch.cuda.synchronize()
del q, k, v, out
torch.ones(1 << 20, device="cuda")
torch.cuda.empty_cache()
print("survived")
"""


class TestOnAGpu:
    pytestmark = gpu

    def test_streams_that_are_destroyed_before_the_tensors(self):
        result = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", DESTROYED],
            cwd=Path(s2o_cupy.__file__).parents[1], env=os.environ, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip
        assert (result.returncode, result.stdout.split()) == (0, ["survived"]), result.stderr

    @pytest.mark.parametrize("kind", ["cupy", "handle", "per thread"])
    def test_freed_inputs_are_not_reused_before_the_call_is_done(self, kind):
        """The given stream is still busy with something else when q is freed and its memory is asked for again."""
        import cupy

        config = s2o_cupy.S2OConfig(dense_up_to=0, segment=256)
        q, k, v = (torch.randn(1, 4, 2000, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        expected = s2o_cupy.s2o_attention(q, k, v, config=config)
        given = cupy.cuda.Stream(non_blocking=True)
        stream = {"cupy": given, "handle": given.ptr, "per thread": 2}[kind]
        for _ in range(5):
            used = q.clone()
            with cupy.cuda.Stream.ptds if kind == "per thread" else given:
                spin(50)
            o = s2o_cupy.s2o_attention(used, k, v, config=config, stream=stream)
            del used
            junk = [torch.full_like(q, float("nan")) for _ in range(4)]
            torch.cuda.synchronize()
            assert torch.equal(o, expected)
            del o, junk
