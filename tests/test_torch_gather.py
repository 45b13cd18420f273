"""The PyTorch operator of lists: what gather_attention gives, whole in graphs that compute the lists."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import random_schedule
from torch_fixtures import fresh_graphs as fresh_graphs
from torch_fixtures import tensors as tensors

from s2o_cupy import Schedule
from s2o_cupy import gather_attention as call
from s2o_cupy.methods import SpargeConfig, select

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from s2o_cupy.integrations.torch_gather import gather_attention, schedule_arguments  # noqa: E402

RULES = [
    {"segment": 128},
    {"segment": 256, "window": 37, "sinks": 20, "order": (1, 2)},
    {"segment": 128, "tau": 0.1, "value_skip": -1.0},
    {"segment": 200, "per_segment": True, "value_skip": (-1.0, -2.0, -3.0, -4.0)},
    {"is_causal": False},
]


def schedule_for(rng, q, **rules):
    array = lambda x: torch.from_numpy(x).to(q.device)  # noqa: E731
    return random_schedule(rng, 300, 500, list_heads=2, unit=64, array=array, **rules)


def operator_arguments(q, k, v, schedule, return_lse=True):
    given = schedule_arguments(schedule)
    limits = given.pop("value_skip")
    limits = None if limits is None else list(np.atleast_1d(limits))
    names = ("entries", "begins", "keys", "k_order", "unit", "block_m", "per_segment", "segment", "window", "sinks",
             "is_causal", "tau")  # fmt: skip
    return q, k, v, *(given[name] for name in names), limits, 0.2, 0.0, "BHSD", return_lse, "auto"


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_same_results_as_the_call(tensors, rng, rules):
    q, k, v = tensors(300, 500, heads=4, kv_heads=2)
    schedule = schedule_for(rng, q, **rules)
    expected = call(q, k, v, schedule, scale=0.2, softcap=3, return_lse=True)
    found = gather_attention(q, k, v, **schedule_arguments(schedule), scale=0.2, softcap=3, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) and x.is_contiguous()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = gather_attention(q, k, v, **schedule_arguments(schedule), scale=0.2, softcap=3, layout="BSHD")
    assert torch.equal(o.transpose(1, 2), expected[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_operator_obeys_pytorchs_rules(tensors, rng, rules):
    """Schema, fake implementation and tracing, static and dynamic, by PyTorch's own checker."""
    q, k, v = tensors(300, 500, heads=4, kv_heads=2)
    for return_lse in (True, False):
        arguments = operator_arguments(q, k, v, schedule_for(rng, q, **rules), return_lse)
        torch.library.opcheck(torch.ops.s2o_cupy.gather_attention.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_computes_the_lists(tensors, backend):
    """One block for each q tile, which the graph chooses by its queries; the graph is whole."""
    q, k, v = tensors(512, heads=4, kv_heads=2)

    def layer(q, k, v):
        tiles = q.unflatten(2, (4, 128)).mean(dim=3)  # [1, 4, 4, D]
        blocks = k.unflatten(2, (4, 128)).mean(dim=3).repeat_interleave(2, dim=1)  # [1, 4, 4, D]
        scores = tiles @ blocks.transpose(2, 3)
        earlier = torch.ones(4, 4, device=q.device).tril(-1) > 0
        best = scores.masked_fill(~earlier, float("-inf")).argmax(dim=-1)  # [1, 4, 4]
        entries = best.to(torch.int32).flatten()
        begins = torch.arange(16, device=q.device).reshape(1, 4, 4)
        keys = torch.tensor([0, 128, 128, 128], device=q.device, dtype=torch.int32).expand(1, 4, 4)
        return gather_attention(q * 1, k, v, entries, begins, keys, unit=128, segment=128) + 1, best

    o, best = torch.compile(layer, backend=backend, fullgraph=True)(q, k, v)
    mask = torch.nn.functional.one_hot(best, 4).bool()
    schedule = Schedule.from_block_mask(mask, 128, segment=128)
    torch.testing.assert_close(o, call(q, k, v, schedule) + 1, rtol=0, atol=0)


def test_autocast(tensors, rng):
    q, k, v = (x.float() for x in tensors(300, 500, heads=4, kv_heads=2))
    arguments = schedule_arguments(schedule_for(rng, q, segment=128))
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        o = gather_attention(q, k, v, **arguments)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, gather_attention(*(x.bfloat16() for x in (q, k, v)), **arguments))


def test_what_is_refused(rng):
    q, k, v = torch.zeros(3, 1, 2, 300, 64)
    schedule = random_schedule(rng, 300, 300, segment=128, array=torch.from_numpy)
    arguments = schedule_arguments(schedule)
    with pytest.raises(TypeError, match="v is a ndarray; accepted: a torch.Tensor"):
        gather_attention(q, k, v.numpy(), **arguments)
    with pytest.raises(ValueError, match="Schedule.from_lists: keys has shape .*; accepted: .*, as begins"):
        gather_attention(q, k, v, **{**arguments, "keys": arguments["keys"][:, :, :1]})
    with pytest.raises(TypeError, match="Schedule.from_lists: begins is int32; accepted: int64"):
        gather_attention(q, k, v, **{**arguments, "begins": arguments["begins"].int()})
    with pytest.raises(ValueError, match=r"requires grad, and S2O is for inference"):
        gather_attention(q.requires_grad_(), k, v, **arguments)
    config = SpargeConfig(tau=1, theta=-1, permutation=(3, 10, 10))
    with pytest.raises(ValueError, match="the schedule has a q_order; accepted: one without"):
        schedule_arguments(select(q.detach(), k, config, is_causal=False))


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("entries", lambda x: x[None], "entries is torch.int32 of 2 axes; accepted: torch.int32 of 1"),
        ("begins", lambda x: x[0], "begins is torch.int64 of 2 axes; accepted: torch.int64 of 3"),
        ("begins", lambda x: x.to(torch.int32), "begins is torch.int32 of 3 axes; accepted: torch.int64 of 3"),
        ("keys", lambda x: x.long(), "keys is torch.int64 of 3 axes; accepted: torch.int32 of 3"),
    ],
)
def test_lists_that_a_graph_cannot_have(tensors, rng, name, changed, said):
    """Said while a graph is traced, where there is no data yet."""
    q, k, v = tensors(300, 500, heads=4, kv_heads=2)
    given = schedule_arguments(schedule_for(rng, q))
    given[name] = changed(given[name])
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=said):
        fake = {key: mode.from_tensor(x) if torch.is_tensor(x) else x for key, x in given.items()}
        gather_attention(*(mode.from_tensor(x) for x in (q, k, v)), **fake)
