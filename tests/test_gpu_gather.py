"""gather_attention on a GPU: float64 dense attention under the mask that a schedule means, on both paths.

Skipped without a GPU. An entry that belongs to no list is far outside of k and v: reading it would be a fault. All
inputs are drawn from fixed seeds.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu, spin
from gpu_cases import place
from gpu_rounding import assert_within_rounding
from pages import paged, random_table
from schedules import RULES, masked_attention, meant, random_schedule

from s2o_cupy import GatherStats, Schedule, gather_attention, gather_attention_paged
from s2o_cupy.reference import dense_attention
from s2o_cupy.reference.gather import gather as definition
from s2o_cupy.reference.lists import KeyLists

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def draw(qkv, dtype, *lengths, **shape):
    return [x.astype(DTYPES[dtype]) for x in qkv(*lengths, **shape)]


def to_gpu(x):
    import cupy

    return cupy.asarray(np.ascontiguousarray(x))


def attend(q, k, v, schedule, **options):
    """Output, lse and stats of host arrays, the first into a poisoned ``out``; on the host."""
    import cupy

    q, k, v = (x if isinstance(x, cupy.ndarray) else cupy.asarray(x) for x in (q, k, v))
    out = cupy.full(q.shape, np.nan, np.float32).astype(q.dtype)
    o, lse, stats = gather_attention(q, k, v, schedule, out=out, return_lse=True, return_stats=True, **options)
    assert o is out and isinstance(stats, GatherStats)
    return cupy.asnumpy(o), cupy.asnumpy(lse), stats


def schedule_of(*lengths, **rules):
    """`random_schedule` on the GPU."""
    return random_schedule(np.random.default_rng(7), *lengths, array=to_gpu, **rules)


def assert_meant(found, q, k, v, schedule, *, scale=None, softcap=0.0):
    """A schedule without a stop against dense attention under its mask."""
    o, lse, stats = found
    mask = meant(schedule, *q.shape[:2])
    options = {"scale": scale, "softcap": softcap}
    exact = masked_attention(q, k, v, mask, **options)
    weight = masked_attention(q, k, np.abs(v.astype(np.float64)), mask, **options)[0]
    launches = 1 + (schedule.form.segment is not None) + (schedule.form.sinks > 0)
    assert_within_rounding(o, lse, exact, weight, q, k, launches=launches, **options)
    batch, heads, seqlen_q, seqlen_k = mask.shape
    visible = np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q) if schedule.form.is_causal else np.ones(mask.shape[2:])
    assert stats.density == pytest.approx(mask.sum() / (batch * heads * visible.sum()))


def assert_same_bits(found, expected):
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert x.shape == y.shape and x.tobytes() == y.tobytes()


# ---------------------------------------------------------------- what a schedule means


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_dense_part(path, qkv, rules, dtype, head_dim):
    q, k, v = draw(qkv, dtype, 500, 777, heads=4, kv_heads=2, head_dim=head_dim)
    schedule = schedule_of(500, 777, list_heads=4, unit=64, **rules)
    schedule.check()
    found = attend(q, k, v, schedule, path=path)
    assert found[2].path == path
    assert_meant(found, q, k, v, schedule)


@pytest.mark.parametrize("unit", [1, 64, 128])
@pytest.mark.parametrize("list_heads", [1, 2, 8])
@pytest.mark.parametrize("per_segment", [False, True])
def test_units_and_heads(path, qkv, unit, list_heads, per_segment):
    q, k, v = draw(qkv, "bfloat16", 600, heads=8, kv_heads=2, head_dim=128, batch=2)
    schedule = schedule_of(600, 600, batch=2, list_heads=list_heads, unit=unit, segment=128,
                           per_segment=per_segment)  # fmt: skip
    assert_meant(attend(q, k, v, schedule, path=path), q, k, v, schedule)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rules", [{}, {"sinks": 9}], ids=str)
def test_sequences_with_and_without_lists_of_their_own(path, qkv, batch, rules):
    q, k, v = draw(qkv, "bfloat16", 300, 500, heads=4, kv_heads=2, head_dim=64, batch=3)
    schedule = schedule_of(300, 500, batch=batch, list_heads=2, segment=128, **rules)
    assert_meant(attend(q, k, v, schedule, path=path), q, k, v, schedule)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (63, 64), (127, 129), (128, 128), (129, 257), (385, 900)])
@pytest.mark.parametrize("sinks", [0, 1])
def test_lengths_around_tiles(path, qkv, lengths, sinks):
    q, k, v = draw(qkv, "bfloat16", *lengths, head_dim=128)
    schedule = schedule_of(*lengths, segment=128, sinks=sinks, share=1.0)
    assert_meant(attend(q, k, v, schedule, path=path), q, k, v, schedule)


@pytest.mark.parametrize("order", [(1, 1), (1, 2), (1, 8), (2, 2), (2, 8)], ids=str)
@pytest.mark.parametrize("unit", [1, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_permutations_of_keys(path, qkv, order, unit, head_dim):
    q, k, v = draw(qkv, "bfloat16", 400, 900, heads=8, kv_heads=2, head_dim=head_dim, batch=2)
    schedule = schedule_of(400, 900, batch=1, list_heads=2, unit=unit, segment=128, window=30, order=order)
    schedule.check()
    assert_meant(attend(q, k, v, schedule, path=path), q, k, v, schedule)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("list_heads", [1, 2, 8])
@pytest.mark.parametrize(
    "rules", [{"is_causal": False}, {"segment": 128}, {"segment": 128, "sinks": 9, "window": 30}, {"order": (1, 2)}],
    ids=str,
)  # fmt: skip
def test_tiles_of_64_queries_after_a_dense_part(path, qkv, head_dim, list_heads, rules):
    """On Hopper two heads that share lists fill a tile: each resumes its own state, and leaves it after the sinks."""
    q, k, v = draw(qkv, "bfloat16", 400, 700, heads=8, kv_heads=2, head_dim=head_dim, batch=2)
    schedule = schedule_of(400, 700, list_heads=list_heads, block_m=64, **rules)
    assert_meant(attend(q, k, v, schedule, path=path), q, k, v, schedule)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"softcap": 2.0, "order": (1, 2)}], ids=str)
def test_options(path, qkv, options):
    q, k, v = draw(qkv, "bfloat16", 400, 700, heads=4, kv_heads=2, head_dim=128)
    options = dict(options)
    schedule = schedule_of(400, 700, segment=128, sinks=3, order=options.pop("order", None))
    assert_meant(attend(q, k, v, schedule, path=path, **options), q, k, v, schedule, **options)


@pytest.mark.parametrize("options", [{"block_m": 64, "head_dim": 136}, {"scale": -0.2}, {"head_dim": 33}], ids=str)
def test_what_only_the_portable_kernels_take(qkv, options):
    options = dict(options)
    q, k, v = draw(qkv, "float16", 400, 700, heads=4, kv_heads=2, head_dim=options.pop("head_dim", 64))
    scale = options.pop("scale", None)
    schedule = schedule_of(400, 700, segment=128, sinks=3, **options)
    found = attend(q, k, v, schedule, scale=scale)
    assert found[2].path == "portable"
    assert_meant(found, q, k, v, schedule, scale=scale)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_q_tiles_than_multiprocessors(path, qkv, head_dim):
    """Persistent blocks go on from tile to tile, among them such with an empty list."""
    q, k, v = draw(qkv, "bfloat16", 1100, heads=32, kv_heads=8, head_dim=head_dim)
    schedule = schedule_of(1100, 1100, list_heads=32, unit=64, segment=128, sinks=40, order=(1, 8))
    found = attend(q, k, v, schedule, path=path)
    assert_meant(found, q, k, v, schedule)
    for _ in range(10):
        assert_same_bits(attend(q, k, v, schedule, path=path), found)


@pytest.mark.parametrize("arrange", ["BSHD", "fused", "one element in", "one head for all"])
def test_arrays_as_they_lie(qkv, arrange):
    q, k, v = draw(qkv, "bfloat16", 300, heads=4, kv_heads=4, head_dim=64, batch=2)
    schedule = schedule_of(300, 300, batch=1, list_heads=4, segment=128, sinks=3)
    placed = [place(to_gpu(x), arrange if name in ("qkv" if arrange != "one head for all" else "q") else "contiguous")
              for name, x in zip("qkv", (q, k, v), strict=True)]  # fmt: skip
    if arrange == "one head for all":
        q = np.broadcast_to(q[:, :1], q.shape)
    assert_meant(attend(*placed, schedule), q, k, v, schedule)


def test_a_stop(path, qkv):
    """Keys that matter come first, so that tau ends the visit; the reference goes as far as the GPU went."""
    q, k, v = draw(qkv, "bfloat16", 500, 3500, heads=4, kv_heads=2, head_dim=128)
    importance = k.astype(np.float32).sum(axis=-1)[0, :, :3000]  # queries have a positive mean
    positions = np.stack([[x.argsort()[::-1]] * 4 for x in importance])[None].astype(np.int32)  # [1, 2, tiles, 3000]
    counts = np.full((1, 2, 4), 3000)
    rules = {"seqlen_q": 500, "seqlen_k": 3500, "segment": 512}
    schedule = Schedule.from_tokens(to_gpu(positions), to_gpu(counts), tau=0.05, **rules)
    schedule.check()
    o, lse, stats = attend(q, k, v, schedule, path=path)
    visited = stats.visited.get()
    assert (visited > 0).all() and visited.max() < 24
    wide = [x.astype(np.float64) for x in (q, k, v)]
    lists = KeyLists(positions.ravel(), np.arange(8).reshape(1, 2, 1, 4) * 3000, np.full((1, 2, 1, 4), 3000, np.int32))
    exact = definition(*wide, lists, schedule.form.dense, visited=visited)
    weight = definition(*wide[:2], np.abs(wide[2]), lists, schedule.form.dense, visited=visited)[0]
    assert_within_rounding(o, lse, exact[:2], weight, q, k, launches=2)


def test_all_blocks_are_dense_attention(path, qkv):
    q, k, v = draw(qkv, "bfloat16", 1000, heads=4, kv_heads=2, head_dim=128)
    mask = to_gpu(np.ones((1, 1, 8, 8), bool))
    schedule = Schedule.from_block_mask(mask, seqlen_q=1000, seqlen_k=1000, segment=256, sinks=128)
    found = attend(q, k, v, schedule, path=path)
    exact = dense_attention(*(x.astype(np.float64) for x in (q, k, v)))
    weight = dense_attention(q.astype(np.float64), k.astype(np.float64), np.abs(v.astype(np.float64)))[0]
    assert_within_rounding(*found[:2], exact, weight, q, k, launches=3)
    assert found[2].density == 1.0


# ---------------------------------------------------------------- the same bits


def test_mask_padded_and_csr_have_the_same_bits(path, qkv, rng):
    q, k, v = draw(qkv, "bfloat16", 600, 728, heads=4, kv_heads=2, head_dim=128)
    mask = rng.random((1, 4, 5, 6)) < 0.5
    rules = {"seqlen_q": 600, "seqlen_k": 728, "segment": 128}
    by_mask = Schedule.from_block_mask(to_gpu(mask), **rules)
    host = Schedule.from_block_mask(mask, **rules)
    counts = -(-host.keys // 128)  # [1, 4, 5] entries
    rows = host.entries.reshape(1, 4, 5, 6)
    padded = Schedule.from_padded(to_gpu(rows), to_gpu(counts), unit=128, **rules)
    indices = np.concatenate([rows[at][: counts[at]] for at in np.ndindex(counts.shape)])
    indptr = np.cumsum([0, *counts.ravel()])
    csr = Schedule.from_csr(to_gpu(indptr), to_gpu(indices), unit=128, list_heads=4, **rules)
    expected = attend(q, k, v, by_mask, path=path)
    assert_meant(expected, q, k, v, by_mask)
    for other in (padded, csr):
        assert_same_bits(attend(q, k, v, other, path=path), expected)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_identity_as_k_order_changes_no_bit(path, qkv, heads):
    q, k, v = draw(qkv, "bfloat16", 300, 700, heads=4, kv_heads=2, head_dim=128)
    plain = schedule_of(300, 700, list_heads=4, unit=64, segment=128)
    expected = attend(q, k, v, plain, path=path)
    identity = to_gpu(np.broadcast_to(np.arange(700, dtype=np.int32), (1, heads, 700)))
    counts = -(-plain.keys // 64)
    order = Schedule.from_padded(
        to_gpu(_rows_of(plain)), counts, unit=64, seqlen_q=300, seqlen_k=700, segment=128, k_order=identity
    )
    assert_same_bits(attend(q, k, v, order, path=path), expected)


def _rows_of(schedule):
    """Its lists as padded rows."""
    entries, begins, keys = (x.get() for x in (schedule.entries, schedule.begins, schedule.keys))
    counts = -(-keys // schedule.form.unit)
    rows = np.zeros((*counts.shape, max(1, counts.max())), np.int32)
    for at in np.ndindex(counts.shape):
        rows[at][: counts[at]] = entries[begins[at] :][: counts[at]]
    return rows


@pytest.mark.parametrize("order", [None, (1, 2)], ids=str)
def test_keys_that_are_not_named_have_no_influence(path, qkv, order):
    q, k, v = draw(qkv, "bfloat16", 300, 1000, heads=4, kv_heads=2, head_dim=128)
    schedule = schedule_of(300, 1000, unit=64, segment=128, sinks=3, share=0.2, order=order)
    expected = attend(q, k, v, schedule, path=path)
    seen = meant(schedule, 1, 4)[0].reshape(2, 2, 300, 1000).any(axis=(1, 2))  # [kv_heads, Lk]
    assert (~seen).sum() > 100
    k[0][~seen], v[0][~seen] = np.nan, np.nan
    assert_same_bits(attend(q, k, v, schedule, path=path), expected)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_pages_have_the_bits_of_arrays(path, qkv, rng, page_size, rules):
    q, k, v = draw(qkv, "bfloat16", 300, 700, batch=2, heads=4, kv_heads=2, head_dim=128)
    schedule = schedule_of(300, 700, batch=2, list_heads=2, unit=64, **rules)
    expected = attend(q, k, v, schedule, path=path)
    table, pages = random_table(rng, [700] * 2, page_size)
    caches = [to_gpu(paged(x, table, pages, page_size, "NHD", [700] * 2)) for x in (k, v)]
    found = gather_attention_paged(to_gpu(q), *caches, to_gpu(table), schedule, path=path, return_lse=True)
    assert_same_bits([x.get() for x in found], expected)


def test_rows_without_a_key(path, qkv):
    q, k, v = draw(qkv, "bfloat16", 256, heads=32, head_dim=128)
    rows, counts = to_gpu(np.zeros((1, 1, 2, 1), np.int32)), to_gpu(np.array([[[0, 1]]]))
    schedule = Schedule.from_tokens(rows, counts, seqlen_q=256, seqlen_k=256, is_causal=False)
    o, lse, _ = attend(q, k, v, schedule, path=path)
    assert (o[:, :, :128].astype(np.float32) == 0).all() and np.isneginf(lse[:, :, :128]).all()
    assert_meant((o, lse, attend(q, k, v, schedule, path=path)[2]), q, k, v, schedule)


# ---------------------------------------------------------------- frameworks, streams, graphs


def test_pytorch(path, qkv):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch with CUDA")
    q, k, v = draw(qkv, "float16", 300, 700, heads=4, kv_heads=2, head_dim=128, batch=2)
    rules = {"batch": 2, "list_heads": 2, "unit": 64, "segment": 128, "sinks": 4, "order": (1, 2)}
    by_cupy = schedule_of(300, 700, **rules)
    expected = attend(q, k, v, by_cupy, path=path)

    def array(x):
        return torch.from_numpy(np.ascontiguousarray(x)).cuda()

    schedule = random_schedule(np.random.default_rng(7), 300, 700, array=array, **rules)
    arrays = [array(x) for x in (q, k, v)]
    stream = torch.cuda.Stream()
    for options in ({}, {"stream": stream}):
        o, lse, stats = gather_attention(*arrays, schedule, path=path, return_lse=True, return_stats=True, **options)
        torch.cuda.synchronize()
        assert stats.path == path and o.is_cuda
        assert_same_bits((o.cpu().numpy(), lse.cpu().numpy()), expected)
    mask = torch.rand(1, 4, 3, 6, device="cuda") < 0.5
    Schedule.from_block_mask(mask, seqlen_q=300, seqlen_k=700, segment=128, window=16).check()


def test_jax(qkv):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("needs a JAX with CUDA")
    q, k, v = draw(qkv, "bfloat16", 300, 700, heads=4, kv_heads=2, head_dim=128)
    rules = {"list_heads": 2, "unit": 64, "segment": 128, "sinks": 4, "order": (1, 2)}
    expected = attend(q, k, v, schedule_of(300, 700, **rules))
    schedule = random_schedule(np.random.default_rng(7), 300, 700, array=jax.numpy.asarray, **rules)
    o, lse = gather_attention(*(jax.numpy.asarray(x) for x in (q, k, v)), schedule, return_lse=True)
    assert_same_bits((np.asarray(o), np.asarray(lse)), expected)


def test_nothing_waits_for_the_gpu(path, qkv):
    """Making a schedule and calling return while the GPU is still busy with what came before."""
    import cupy

    q, k, v = (to_gpu(x) for x in draw(qkv, "bfloat16", 1000, heads=4, kv_heads=2, head_dim=128))
    mask = to_gpu(np.random.default_rng(0).random((1, 4, 8, 8)) < 0.5)
    order = to_gpu(np.arange(1000, dtype=np.int32)[None, None])

    def call():
        schedule = Schedule.from_block_mask(mask, seqlen_q=1000, seqlen_k=1000, segment=128, sinks=128, k_order=order)
        return gather_attention(q, k, v, schedule, path=path)

    expected = call()
    call()
    cupy.cuda.get_current_stream().synchronize()
    spin(300)
    o = call()
    assert not cupy.cuda.get_current_stream().done
    assert_same_bits([cupy.asnumpy(o)], [cupy.asnumpy(expected)])


def test_a_cuda_graph(path, qkv):
    """A captured call reads what its schedule's arrays then hold."""
    import cupy

    q, k, v = (to_gpu(x) for x in draw(qkv, "bfloat16", 500, heads=4, kv_heads=2, head_dim=128))
    schedule = schedule_of(500, 500, list_heads=4, unit=64, segment=128, sinks=5)
    out = cupy.zeros_like(q)
    expected = cupy.asnumpy(gather_attention(q, k, v, schedule, path=path, out=out))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        gather_attention(q, k, v, schedule, path=path, out=out)
        graph = stream.end_capture()
    out.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_same_bits([cupy.asnumpy(out)], [expected])
    schedule.keys[...] = 0  # all lists are empty now
    graph.launch(stream)
    stream.synchronize()
    blank = gather_attention(q, k, v, schedule, path=path)
    assert_same_bits([cupy.asnumpy(out)], [cupy.asnumpy(blank)])
    assert cupy.asnumpy(out).tobytes() != expected.tobytes()


# ---------------------------------------------------------------- what is refused


def test_what_is_refused(qkv):
    q, k, v = (to_gpu(x) for x in draw(qkv, "bfloat16", 100, head_dim=12))
    with pytest.raises(ValueError, match=r"has a k_order, and a row .* or head_dim \(12\) is no multiple of 8"):
        gather_attention(q, k, v, schedule_of(100, 100, segment=128, order=(1, 1)))
    with pytest.raises(TypeError, match="come from different frameworks"):
        gather_attention(q, k, v, random_schedule(np.random.default_rng(0), 100, 100, segment=128))
