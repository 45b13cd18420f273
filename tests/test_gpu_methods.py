"""Methods on a GPU, stage by stage against the reference, and as attention. Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu, spin
from method_stages import selected, wrong_stages
from test_methods import WHOLE, underflowing

from s2o_cupy import gather_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.methods import (
    AShapeConfig,
    FlexPrefillConfig,
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    VerticalSlashConfig,
    XAttentionConfig,
    kernels,
    last_rows,
    select,
    sparse_attention,
)
from s2o_cupy.reference.methods import blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
CONFIGS = {
    "MeanPooling": MeanPoolingConfig(),
    "MeanPooling 64": MeanPoolingConfig(block=64, threshold=0.5, keep_first=False),
    "PBS": PBSConfig(),
    "PBS 64": PBSConfig(block=64, segment=192, share="kv_head", threshold=0.6, keep_first=False),
    "PBS 1024": PBSConfig(segment=1024),
    "Sparge": SpargeConfig(tau=0.9, theta=-0.1),
    "Sparge judged": SpargeConfig(tau=0.7, theta=0.32, keep_first=True),
    "Sparge topk": SpargeConfig(topk=0.1, theta=0.32),
    "PBS+": PBSConfig(scores="antidiagonal"),
    "PBS+ 8": PBSConfig(scores="antidiagonal", stride=8, share="kv_head", threshold=0.7),
    "XAttention": XAttentionConfig(),
    "XAttention 16": XAttentionConfig(stride=16, threshold=0.7),
    "XAttention portable": XAttentionConfig(path="portable"),
    "FlexPrefill": FlexPrefillConfig(),
    "FlexPrefill means": FlexPrefillConfig(gamma=0.6, tau=0.9, min_blocks=2),
    "vertical-slash": VerticalSlashConfig(verticals=100, slashes=60),
    "vertical-slash 64": VerticalSlashConfig(verticals=40, slashes=300, block_m=64),
}
BEYOND_32_BITS = {
    "FlexPrefill": FlexPrefillConfig(min_blocks=2**40), "vertical-slash": VerticalSlashConfig(verticals=2**40)
}  # fmt: skip
LENGTHS = [(1000, 1000), (2816, 2816), (300, 2100), (1, 700), (128, 128), (129, 1025)]


def draw(rng, dtype, seqlen_q, seqlen_k, *, batch=1, heads=4, kv_heads=2, head_dim=128):
    """Keys of slow change, so that blocks differ."""
    slow = np.repeat(rng.standard_normal((batch, kv_heads, -(-seqlen_k // 96), head_dim)), 96, axis=2)[:, :, :seqlen_k]
    q = 2 * rng.standard_normal((batch, heads, -(-seqlen_q // 80), head_dim)).repeat(80, axis=2)[:, :, :seqlen_q]
    q, k = q + rng.standard_normal(q.shape), slow + rng.standard_normal(slow.shape)
    return [x.astype(DTYPES[dtype]) for x in (q, k, rng.standard_normal(k.shape))]


def assert_stages(q, k, config, **options):
    found = selected(q, k, config, **options)
    assert wrong_stages(found, q, k, config) == []
    return found


@pytest.mark.parametrize("config", BEYOND_32_BITS.values(), ids=BEYOND_32_BITS)
def test_more_than_there_is(rng, config):
    q, k, _ = draw(rng, "float16", 1500, 1500)
    assert_stages(q, k, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_stage(rng, config, dtype, head_dim):
    q, k, _ = draw(rng, dtype, 1500, 1500, head_dim=head_dim)
    assert_stages(q, k, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(rng, config, lengths):
    q, k, _ = draw(rng, "bfloat16", *lengths, batch=2)
    assert_stages(q, k, config, scale=0.05)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (8, 2), (8, 1)], ids=str)
def test_groups_of_heads(rng, config, heads):
    q, k, _ = draw(rng, "bfloat16", 900, 900, heads=heads[0], kv_heads=heads[1])
    assert_stages(q, k, config)


@pytest.mark.parametrize("long_rows", [False, True])
@pytest.mark.parametrize("config", WHOLE, ids=str)
def test_a_threshold_of_1_takes_blocks_whose_weight_underflows(rng, monkeypatch, config, long_rows):
    import cupy

    clear_cache()
    if long_rows:
        monkeypatch.setattr(kernels, "MOST_OF_ROW", 0)
    q, k, v = (cupy.asarray(x, "float16") for x in underflowing(rng))
    try:
        _, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    finally:
        clear_cache()
    assert stats.density == 1.0


def test_thresholds_of_each_head(rng):
    q, k, _ = draw(rng, "bfloat16", 900, 900, batch=2)
    assert_stages(q, k, SpargeConfig(tau=(0.3, 0.6, 0.9, 1.0), theta=(-1.0, 0.2, 0.4, 2.0)))
    assert_stages(q, k, SpargeConfig(topk=(0.02, 0.3, 0.6, 1.0), theta=(-1.0, 0.2, 0.4, 2.0)))


@pytest.mark.parametrize("config", [CONFIGS["Sparge"], CONFIGS["Sparge judged"], CONFIGS["MeanPooling"]], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 777), (900, 200), (128, 64)], ids=str)
def test_without_causality(rng, config, lengths):
    q, k, _ = draw(rng, "bfloat16", *lengths, batch=2)
    assert_stages(q, k, config, is_causal=False)


def test_tokens_of_a_grid(path, rng):
    import cupy

    config = SpargeConfig(tau=0.6, theta=0.1, permutation=(3, 10, 20), path=path)
    q, k, v = draw(rng, "bfloat16", 650, 650, batch=2)
    assert_stages(q, k, config, is_causal=False)
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    o, lse = (cupy.asnumpy(x) for x in sparse_attention(*on_gpu, config=config, is_causal=False, return_lse=True))
    order = config.token_order(650)
    moved = [cupy.ascontiguousarray(x[:, :, order]) for x in on_gpu]
    plain = replace(config, permutation=None)
    expected, expected_lse = sparse_attention(*moved, config=plain, is_causal=False, return_lse=True)
    # The same keys in the same order, so the same bits.
    assert o[:, :, order].tobytes() == cupy.asnumpy(expected).tobytes()
    assert lse[:, :, order].tobytes() == cupy.asnumpy(expected_lse).tobytes()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rounds_change_no_bit(rng, config):
    q, k, _ = draw(rng, "bfloat16", 9000, 20000, heads=32, kv_heads=8, head_dim=64)
    whole, rounds = selected(q, k, config), selected(q, k, replace(config, workspace_bytes=1 << 20))
    for x, y in zip(whole.lists, rounds.lists, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("waves", "kv_heads"), [(0, 2), (1, 2), (1, 16)])
def test_importance_in_one_split_and_in_many(rng, head_dim, waves, kv_heads, monkeypatch):
    """Of few keys each split has one tile; here a block walks many, or a few."""
    monkeypatch.setattr(last_rows, "WAVES", dict.fromkeys(last_rows.WAVES, waves))
    q, k, _ = draw(rng, "bfloat16", 300, 30_000 if waves else 3_000, heads=16, kv_heads=kv_heads, head_dim=head_dim)
    clear_cache()
    try:
        assert_stages(q, k, CONFIGS["PBS"])
    finally:
        clear_cache()


@pytest.mark.parametrize("config", [CONFIGS["MeanPooling 64"], CONFIGS["Sparge"]], ids=str)
@pytest.mark.parametrize("seqlen_k", [15_000, 30_000, 60_000, 120_000, 140_000])
def test_rows_of_many_columns(rng, config, seqlen_k):
    """As many as 8, 16, 32 or 64 columns a lane hold, and more."""
    q, k, _ = draw(rng, "bfloat16", 200, seqlen_k, heads=2, kv_heads=1, head_dim=64)
    assert_stages(q, k, config)


@pytest.mark.parametrize("config", [CONFIGS["PBS 64"], CONFIGS["Sparge judged"], CONFIGS["MeanPooling"]], ids=str)
def test_long_rows(rng, config, monkeypatch):
    """By the kernel for rows of more than 2,048 columns: the same lists."""
    q, k, _ = draw(rng, "bfloat16", 700, 20000, batch=2)
    short = selected(q, k, config)
    clear_cache()
    monkeypatch.setattr(kernels, "MOST_OF_ROW", 0)
    try:
        found = assert_stages(q, k, config)
    finally:
        clear_cache()
    # Sums are added up in another order, so that a weight at the threshold may count otherwise.
    assert (found.columns != short.columns).sum() <= 2


@pytest.mark.parametrize("threshold", [0.3, 0.5, 1.0])
def test_equal_scores_count_by_column(threshold):
    """All keys are one: weights are equal, to the bit."""
    config = MeanPoolingConfig(threshold=threshold, keep_first=False)
    q = np.ones((1, 1, 2048, 64), np.float16)
    k = np.ones((1, 1, 2048, 64), np.float16)
    found = selected(q, k, config)
    visible = np.arange(1, 17)
    reached = np.ceil(np.float32(threshold) * visible.astype(np.float32))
    count = np.minimum(reached, visible - 1)  # the last is in the dense part
    np.testing.assert_array_equal(found.columns[0, 0], np.arange(16) < count[:, None])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sparse_attention_is_gather_attention_by_what_is_selected(path, rng, config):
    import cupy

    if config.block_q == 64 and path == "hopper":
        pytest.skip("block_m is 64")
    config = replace(config, path=path)
    q, k, v = (cupy.asarray(x) for x in draw(rng, "bfloat16", 700, 1500, batch=2))
    schedule = select(q, k, config)
    schedule.check()
    expected = gather_attention(q, k, v, schedule, path=path, return_lse=True)
    for _ in range(2):
        found = sparse_attention(q, k, v, config=config, return_lse=True)
        for x, y in zip(found, expected, strict=True):
            assert cupy.asnumpy(x).tobytes() == cupy.asnumpy(y).tobytes()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_key_that_is_not_a_number_is_chosen(rng, config):
    q, k, _ = draw(rng, "bfloat16", 1500, 1500)
    k[0, 1, 40, 3] = np.nan
    found = selected(q, k, config)
    assert found.columns[0, 2:][:, blocks.listed_columns(found.grid)].all()
    other, k[0, 1, 40, 3] = found.columns, 0
    np.testing.assert_array_equal(selected(q, k, config).columns[0, :2], other[0, :2])


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["PBS"], CONFIGS["Sparge"], SpargeConfig(tau=0.5, theta=0.1, permutation=(1, 30, 40)),
        AShapeConfig(initial=100, window=200),
    ],
    ids=str,
)
def test_graphs_choose_anew(path, rng, config):
    """A captured call chooses by what q and k hold at each replay, and its schedule is no one else's memory."""
    import cupy

    config = replace(config, path=path)
    options = {"is_causal": not config.orders_queries}
    first, other = ([cupy.asarray(x) for x in draw(rng, "bfloat16", 1200, 1200)] for _ in range(2))
    held = [x.copy() for x in first]
    out = cupy.empty_like(held[0])
    expected = [cupy.asnumpy(sparse_attention(*x, config=config, **options)) for x in (first, other)]
    sparse_attention(*held, config=config, out=out, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        sparse_attention(*held, config=config, out=out, **options)
        graph = stream.end_capture()
    for x, y in zip(held, other, strict=True):
        x[...] = y
    mine = [cupy.full(1 << 20, 7, np.int32) for _ in range(8)]  # what the pool has to give
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert cupy.asnumpy(out).tobytes() == expected[1].tobytes() != expected[0].tobytes()
    assert all((x == 7).all() for x in mine)


@pytest.mark.parametrize("config", [CONFIGS["PBS"], CONFIGS["Sparge"]], ids=str)
def test_torch(rng, config):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.astype(np.float32)).cuda().bfloat16() for x in draw(rng, "bfloat16", 1200, 1200))
    expected = sparse_attention(q, k, v, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse_attention(q, k, v, config=config)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    schedule = select(q, k, config)
    assert all(isinstance(x, torch.Tensor) and x.device == q.device for x in schedule.arrays.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nothing_waits_for_the_gpu(rng, config):
    import time

    import cupy

    q, k, v = (cupy.asarray(x) for x in draw(rng, "bfloat16", 1200, 1200))
    sparse_attention(q, k, v, config=config)
    cupy.cuda.Device().synchronize()
    spin(300)
    start = time.perf_counter()
    sparse_attention(q, k, v, config=config)
    assert time.perf_counter() - start < 0.15
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("stride", [8, 16])
def test_antidiagonals_of_rows_that_do_not_start_on_16_bytes(rng, stride):
    q, k, _ = draw(rng, "bfloat16", 700, 900, head_dim=100)
    assert_stages(q, k, XAttentionConfig(stride=stride))
