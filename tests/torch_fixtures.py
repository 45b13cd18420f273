"""Fixtures of tests that compile PyTorch graphs: a file that imports them has them."""

from __future__ import annotations

import pytest
from conftest import has_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def tensors(request, qkv):
    """tensors(seqlen_q, seqlen_k=None, ...) -> q, k, v; float32 on the CPU, bfloat16 on a GPU."""
    import torch

    if request.param == "cuda" and not (has_gpu() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and CuPy and PyTorch with CUDA")
    dtype = torch.float32 if request.param == "cpu" else torch.bfloat16
    return lambda *lengths, **shape: [torch.from_numpy(x).to(request.param, dtype) for x in qkv(*lengths, **shape)]


@pytest.fixture(autouse=True)
def fresh_graphs():
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
