"""Warpgroups of NSA's Hopper kernels, and of pass 2 with two blocks on a multiprocessor, go their own ways and meet at
barriers in memory: however slow one of them is, be it the one that copies, a call has the same bits. A delay is planted
in each in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from nsa_cases import draw
from test_gpu_nsa import DTYPES, attend

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import compiler
from s2o_cupy.nsa import NSAConfig
from s2o_cupy.tools.catalogue import kernels_for

NANOSECONDS = 5000  # of a step; one takes some 2,000
LENGTH = 9000  # five steps of compressed keys, of which three are in shared memory
CONFIG = NSAConfig(window=1024)  # more than 16 steps of keys, of which four are in shared memory


@dataclass(frozen=True)
class Delay:
    function: str
    before: str  # which line of the source it is
    who: str  # condition in CUDA C++; "": the warpgroup that copies
    heads: int = 1  # of a KV head

    def plant(self, text: str) -> str:
        assert text.count(self.before) == 1, f"{self.before}: gone, or no longer the only one"
        wait = f"__nanosleep({NANOSECONDS});\n"
        return text.replace(self.before, (f"if ({self.who}) {wait}" if self.who else wait) + self.before)


DELAYS = [
    *(Delay("nsa_window_sm90", "state.attend(window, q_tile", f"group == {i}") for i in range(3)),
    Delay("nsa_window_sm90", "load(copies, step);", ""),
    *(Delay("nsa_compressed_sm90", "load_next(step);\n      wgmma_wait<1>", f"warpgroup == {i}") for i in range(2)),
    Delay("nsa_compressed_sm90", "if (step < steps) bring(kKeys, step);", ""),
    *(Delay("nsa_block_weights_sm90", "weigh(d[0], 0);", f"warpgroup == {i}", heads=2) for i in (0, 3)),
    *(Delay("nsa_block_weights_sm90", "weigh(d[turn % 2], turn);", f"warpgroup == {i}", heads=4) for i in range(2)),
]  # fmt: skip


# Of pass 2 with a head_dim of 64, where keys are gathered and where they come by boxes.
PASS2_DELAYS = [
    Delay(function, before, who)
    for function in ("pass2_sm90", "pass2_boxes_sm90")
    for before, who in (
        *(("    issue_scores<1>(my, q);", f"my.group == {i}") for i in range(2)),
        ("      if (tile > tiles) continue;", ""),
    )
]


@pytest.mark.parametrize("delay", [*DELAYS, *PASS2_DELAYS], ids=str)
def test_every_delay_has_its_place(delay):
    """Without a GPU: the sources still hold the lines that delays stand before."""
    kernel = next(kernel for kernel in kernels_for(90) if kernel.function == delay.function)
    assert delay.plant(compiler.render(kernel)) != compiler.render(kernel)


def with_delay(delay, monkeypatch, run):
    """What ``run`` returns with kernels as they are, and with the delay in them."""
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if not has_hopper():
        pytest.skip("needs compute capability 9.0")
    expected, good, planted = run(), compiler.render, []

    def render(kernel):
        if kernel.function != delay.function:
            return good(kernel)
        planted.append(kernel.name)
        return delay.plant(good(kernel))

    monkeypatch.setattr(compiler, "render", render)
    monkeypatch.setattr(compiler, "_loaded", {})
    clear_cache()
    try:
        found = run()
    finally:
        clear_cache()
    assert planted
    return expected, found


@pytest.mark.gpu
@pytest.mark.parametrize("delay", DELAYS, ids=str)
def test_a_slow_warpgroup_changes_no_bit(delay, monkeypatch):
    x = draw(np.random.default_rng(0), DTYPES["bfloat16"], LENGTH, heads=delay.heads, kv_heads=1, head_dim=128)
    for one, other in zip(*with_delay(delay, monkeypatch, lambda: attend(x, CONFIG)), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("delay", PASS2_DELAYS, ids=str)
def test_a_slow_warpgroup_of_pass2_changes_no_bit(delay, monkeypatch):
    """Q tiles of up to some twenty key tiles, two of which are in shared memory; more than an H200 has blocks."""
    rng, by_boxes = np.random.default_rng(0), delay.function == "pass2_boxes_sm90"
    host = [rng.standard_normal((1, heads, 3000, 64)) for heads in (16, 8, 8)]
    host[0] *= np.linspace(0.2, 2, 16)[:, None, None]  # heads that look at few keys and at many
    config = S2OConfig(rank="weight" if by_boxes else "mean", tail="none", tau=0.2, dense_up_to=0)

    def run():
        import cupy

        q, k, v = (cupy.asarray(x.astype(DTYPES["bfloat16"])) for x in host)
        o, lse, stats = s2o_attention(q, k, v, config=config, return_lse=True, return_stats=True)
        return [cupy.asnumpy(x) for x in (o, lse, stats.visited)]

    expected, found = with_delay(delay, monkeypatch, run)
    assert [x.tobytes() for x in expected] == [x.tobytes() for x in found]
    last_tiles = expected[2][..., -1, :1]  # with most keys to visit
    assert last_tiles.min() < last_tiles.max()  # some stop before others
