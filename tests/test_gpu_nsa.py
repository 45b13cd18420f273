"""NSA on a GPU against its reference in float64, given the GPU's blocks. Skipped without a GPU."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu
from nsa_cases import SMALL, branch_problems, choice_problems, draw, whole_problems, wide

from s2o_cupy.nsa import NSAConfig, nsa_attention, nsa_select, selected_attention, window_attention
from s2o_cupy.reference.nsa import forward as nsa

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
HEADS = [2, 4]  # 1 and 2 of a KV head: with one, Hopper has another kernel for compressed attention
LARGE = NSAConfig(block=128, top=4, window=300)


def to_gpu(x):
    import cupy

    return cupy.asarray(np.ascontiguousarray(x))


def attend(x, config, **options):
    """Output and blocks on the host; ``out`` is poisoned before."""
    import cupy

    q, k, v, k_cmp, v_cmp, gates = map(to_gpu, x)
    out = cupy.full(q.shape, np.nan, np.float32).astype(q.dtype)
    o = nsa_attention(q, k, v, k_cmp, v_cmp, gates, config=config, out=out, **options)
    assert o is out
    return cupy.asnumpy(o), cupy.asnumpy(nsa_select(q, k_cmp, seqlen_k=k.shape[2], config=config))


def assert_right(x, config):
    o, blocks = attend(x, config)
    assert choice_problems(blocks, x, config) == []
    assert whole_problems(o, x, blocks, config) == []


def test_compressed_values_that_are_not_finite(rng):
    """Rows before them keep their bits, and so do the blocks of all."""
    for heads in HEADS:
        x = draw(rng, DTYPES["float16"], 3000, heads=heads, head_dim=128)
        before, blocks = attend(x, SMALL)
        x.v_cmp[:, :, [5, 130], 7], x.v_cmp[:, :, 150, 9] = np.inf, np.nan
        after, same = attend(x, SMALL)
        np.testing.assert_array_equal(blocks, same)
        end = 5 * 16 + 31
        assert after[:, :, :end].tobytes() == before[:, :, :end].tobytes()
        assert not np.isfinite(after[:, :, end:, 7]).any()
        assert np.isfinite(after[:, :, : 150 * 16 + 31, 9]).all()
        assert np.isnan(after[:, :, 150 * 16 + 31 :, 9]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["64", "128"])
def test_groups(rng, dtype, group, config):
    x = draw(rng, DTYPES[dtype], 700, heads=2 * group, head_dim=128, config=config)
    assert_right(x, config)
    assert_right(x, dataclasses.replace(config, path="portable"))


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["64", "128"])
def test_head_sizes(rng, head_dim, config):
    assert_right(draw(rng, DTYPES["bfloat16"], 600, head_dim=head_dim, config=config), config)


@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (15, 15), (31, 31), (32, 32), (65, 65), (1, 700), (16, 700), (37, 800), (333, 777), (1029, 1029)],
)
@pytest.mark.parametrize("heads", HEADS)
def test_lengths(rng, lengths, heads):
    assert_right(draw(rng, DTYPES["float16"], *lengths, batch=2, heads=heads), SMALL)


@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(top=6, first=0, local=1, window=100), NSAConfig(top=6, first=2, local=3, window=40),
        NSAConfig(top=5, length=16), NSAConfig(top=5, length=8, stride=8), NSAConfig(top=3, length=8, stride=4),
        NSAConfig(top=32, window=1), NSAConfig(top=5, path="portable"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", HEADS)
def test_configurations(rng, config, heads):
    assert_right(draw(rng, DTYPES["bfloat16"], 1500, heads=heads, config=config), config)


@pytest.mark.parametrize(
    ("group", "length"),
    [(1, 3_000), (1, 16_000), (1, 30_000), (1, 60_000), (2, 60_000), (1, 80_000), (2, 80_000), (1, 140_000)],
)
def test_long_rows_of_blocks(rng, group, length):
    """Pieces of eight blocks one, two, four and eight a lane, and more than are looked at; more candidates than a warp
    holds in registers, and equals among them."""
    x = draw(rng, DTYPES["bfloat16"], 40, length, heads=group, kv_heads=1)
    assert_right(x, NSAConfig())
    x.k_cmp[:, :, 500:] = 0
    blocks = attend(x, NSAConfig())[1]
    assert choice_problems(blocks, x, NSAConfig()) == []


@pytest.mark.parametrize("scale", [-0.2, 0.0, 0.3])
@pytest.mark.parametrize("heads", HEADS)
def test_scales(rng, scale, heads):
    """Of one that is not positive scores are multiplied before they are compared. All blocks are attended to."""
    config = NSAConfig(top=32, window=130)
    x = draw(rng, DTYPES["float16"], 700, heads=heads, head_dim=128, config=config)
    exact = nsa_attention(*wide(*x[:5]), x.gates, config=config, scale=scale)
    o = attend(x, config, scale=scale)[0]
    # Three branches with gates of at most 1, whose weights, part and output are each rounded to 2^-11 of the values.
    atol = 9 * 2.0**-11 * float(np.abs(x.v.astype(np.float64)).max())
    np.testing.assert_allclose(o.astype(np.float64), exact, rtol=0, atol=atol)


def test_of_equal_weights_the_first(rng):
    x = draw(rng, DTYPES["bfloat16"], 3000, heads=2, kv_heads=1)
    x.k_cmp[:] = 0
    blocks = attend(x, SMALL)[1]
    for i in (700, 2999):
        own = i // 64
        assert blocks[0, 0, i].tolist() == [0, 1, 2, own - 1, own]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_selected_alone(rng, block, group):
    """Blocks in any order, of which some are none, some in the future and some of short rows."""
    import cupy

    x = draw(rng, DTYPES["bfloat16"], 500, 777, heads=2 * group, head_dim=128, batch=2)
    count = -(-777 // block)
    blocks = np.stack([rng.permutation(count)[:6] for _ in range(2 * 2 * 500)]).reshape(2, 2, 500, 6)
    blocks[rng.random(blocks.shape) < 0.3] = -1
    o, lse = selected_attention(*map(to_gpu, x[:3]), to_gpu(blocks), block, return_lse=True)
    q, k, v = wide(*x[:3])
    exact = nsa.selected(q, k, v, blocks, block=block)
    weight = nsa.selected(q, k, np.abs(v), blocks, block=block)[0]
    assert branch_problems(cupy.asnumpy(o), cupy.asnumpy(lse), exact, weight, x, 2) == []


def window_problems(x, window, sinks):
    import cupy

    o, lse = window_attention(*map(to_gpu, x[:3]), window, sinks, return_lse=True)
    q, k, v = wide(*x[:3])
    exact, weight = nsa.window(q, k, v, window, sinks=sinks), nsa.window(q, k, np.abs(v), window, sinks=sinks)[0]
    return branch_problems(cupy.asnumpy(o), cupy.asnumpy(lse), exact, weight, x, 1)


@pytest.mark.parametrize("window", [1, 64, 200, 10_000])
@pytest.mark.parametrize("sinks", [0, 5, 130])
@pytest.mark.parametrize("lengths", [(500, 500), (300, 777)])
def test_window_alone(rng, window, sinks, lengths):
    assert window_problems(draw(rng, DTYPES["float16"], *lengths, head_dim=128), window, sinks) == []


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_one_branch_at_a_time(rng, branch):
    x = draw(rng, DTYPES["bfloat16"], 900, head_dim=128)
    x.gates[:] = np.eye(3)[branch]
    assert_right(x, SMALL)


def test_workspace_rounds_change_no_bit(rng):
    x = draw(rng, DTYPES["bfloat16"], 1500, heads=8, head_dim=128)
    few = NSAConfig(top=5, window=130, workspace_bytes=1 << 20)
    for one, other in zip(attend(x, SMALL), attend(x, few), strict=True):
        assert one.tobytes() == other.tobytes()


def test_repeats_have_the_same_bits(rng):
    x = draw(rng, DTYPES["bfloat16"], 3000, heads=8, head_dim=128)
    first = attend(x, SMALL)[0].tobytes()
    assert all(attend(x, SMALL)[0].tobytes() == first for _ in range(10))


def test_a_call_that_comes_again_reads_what_is_there_then(rng):
    """From the second time on it is a CUDA graph, whose branches run side by side."""
    import cupy

    one, other = (draw(rng, DTYPES["bfloat16"], 1029, batch=2, head_dim=128) for _ in range(2))
    expected = [attend(x, SMALL)[0] for x in (one, other)]
    given = [to_gpu(a) for a in one]
    out = cupy.empty_like(given[0])
    for turn in range(6):
        for array, values in zip(given, (one, other)[turn % 2], strict=True):
            array.set(values)
        out.fill(0)
        nsa_attention(*given, config=SMALL, out=out)
        assert cupy.asnumpy(out).tobytes() == expected[turn % 2].tobytes(), turn


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["64", "128"])
def test_keys_that_are_not_read_have_no_influence(rng, config):
    """NaN in one block of keys and values changes no row that does not see it, and each that does."""
    x = draw(rng, DTYPES["bfloat16"], 900, head_dim=128, config=config)
    before, blocks = attend(x, config)
    bad = 500
    x.k[:, :, bad] = x.v[:, :, bad] = np.nan
    after, same = attend(x, config)
    np.testing.assert_array_equal(blocks, same)
    p = np.arange(900)
    sees = ((blocks == bad // config.block).any(axis=-1) | (p < bad + config.window)) & (p >= bad)  # [B, Hkv, Lq]
    sees = sees.repeat(2, axis=1)
    assert np.isnan(after[sees]).all()
    assert after[~sees].tobytes() == before[~sees].tobytes()


@pytest.mark.parametrize("path", ["auto", "portable"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block"), [("float16", 64, 64), ("bfloat16", 128, 64), ("float16", 128, 128)]
)
def test_values_that_are_not_read_have_no_influence(rng, dtype, head_dim, block, value, path):
    """One such value changes no bit of a row that does not see it, and makes each that does infinite or NaN."""
    config = NSAConfig(block, top=4, window=130, path=path)
    x = draw(rng, DTYPES[dtype], 700, head_dim=head_dim, config=config)
    before, blocks = attend(x, config)
    x.v[:, :, 300, 5] = value
    after, _ = attend(x, config)
    p = np.arange(700)
    sees = ((blocks == 300 // block).any(axis=-1) | (p < 300 + config.window)) & (p >= 300)
    sees = sees.repeat(2, axis=1)
    assert not np.isfinite(after[sees][:, 5]).any()
    assert after[~sees].tobytes() == before[~sees].tobytes()


@pytest.mark.parametrize("block", [64, 128])
def test_values_of_a_tokens_own_block(rng, block):
    """The selected branch by itself masks keys of the block that a token is in."""
    import cupy

    x = draw(rng, DTYPES["bfloat16"], 300, head_dim=128)
    blocks = np.arange(-(-300 // block))[None, None, None].repeat(300, axis=2).repeat(2, axis=1)
    attend_blocks = lambda: cupy.asnumpy(selected_attention(*map(to_gpu, x[:3]), to_gpu(blocks), block))  # noqa: E731
    before = attend_blocks()
    x.v[:, :, 150, 3], x.v[:, :, 170] = np.nan, np.inf
    after = attend_blocks()
    assert after[:, :, :150].tobytes() == before[:, :, :150].tobytes()
    assert np.isnan(after[:, :, 150:, 3]).all()
    assert np.isfinite(after[:, :, 150:170, 4:]).all()
    assert not np.isfinite(after[:, :, 170:]).any()


@pytest.mark.parametrize("heads", HEADS)
def test_a_compressed_key_is_not_read_before_its_time(rng, heads):
    x = draw(rng, DTYPES["bfloat16"], 700, heads=heads, head_dim=64)
    before, _ = attend(x, SMALL)
    x.k_cmp[:, :, 20] = x.v_cmp[:, :, 20] = np.nan
    after, _ = attend(x, SMALL)
    end = 20 * 16 + 31
    assert after[:, :, :end].tobytes() == before[:, :, :end].tobytes()
    assert np.isnan(after[:, :, end:]).all()


@pytest.mark.parametrize("path", ["auto", "portable"])
@pytest.mark.parametrize("group", [3, 5])
def test_a_compressed_key_of_infinite_weight_against_it(rng, group, path):
    """Its weight is zero in every head: those that fill up the group's tile must not make NaN of it."""
    config = dataclasses.replace(SMALL, path=path)
    x = draw(rng, DTYPES["bfloat16"], 900, heads=2 * group, head_dim=64)
    x.q[..., 0] = np.abs(x.q[..., 0]) + 1
    before = attend(x, config)[1]
    assert choice_problems(before, x, config) == []
    x.k_cmp[:, :, 20, 0] = -np.inf
    assert choice_problems(attend(x, config)[1], x, config) == []


@pytest.mark.parametrize("path", ["auto", "portable"])
def test_values_of_the_largest_float16_stay_finite(rng, path):
    config = dataclasses.replace(SMALL, path=path)
    x = draw(rng, DTYPES["float16"], 700, head_dim=128)
    x.v[:], x.v_cmp[:] = 65504, 65504
    x.gates[:] = [0, 1, 0]
    assert (attend(x, config)[0] >= 65440).all()  # rounded once or twice; infinity would be more
    assert np.isfinite(attend(x, config)[0]).all()


@pytest.mark.parametrize("config", [NSAConfig(top=1, first=0, local=1), NSAConfig(top=2, first=0, local=2)], ids=str)
@pytest.mark.parametrize("path", ["auto", "portable"])
def test_all_blocks_are_the_windows(rng, config, path):
    assert_right(draw(rng, DTYPES["bfloat16"], 700, head_dim=64), dataclasses.replace(config, path=path))


def test_an_infinite_value_of_no_weight_is_nan(rng):
    """As in the reference: zero times infinity, in blocks that weigh nothing beside the first. The window's is inf."""
    x = draw(rng, DTYPES["bfloat16"], 700, head_dim=64)
    x.q[:], x.k[:] = 16, 0
    x.k[:, :, :64] = 16  # a score of 2048 in the first block
    x.v[:, :, 600] = np.inf
    x.gates[:] = [0, 1, 1]
    assert np.isinf(window_attention(*map(to_gpu, x[:3]), SMALL.window).get()[:, :, 600:]).all()
    o = attend(x, SMALL)[0]
    assert np.isnan(o[:, :, 600:]).all()
    assert np.isfinite(o[:, :, :600]).all()


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_torch_tensors_as_they_lie(rng, torch, layout):
    x = draw(rng, np.float32, 600, heads=8, head_dim=128)
    q, k, v, k_cmp, v_cmp = (torch.from_numpy(a).to(torch.bfloat16).cuda() for a in x[:5])
    gates = torch.from_numpy(x.gates).cuda()
    expected = nsa_attention(q, k, v, k_cmp, v_cmp, gates, config=SMALL)
    if layout == "BSHD":
        q, k, v, k_cmp, v_cmp, gates = (a.transpose(1, 2) for a in (q, k, v, k_cmp, v_cmp, gates))
    padded = torch.zeros(*q.shape[:-1], 136, dtype=q.dtype, device="cuda")
    padded[..., 4:132] = q
    for rows in (q, padded[..., 4:132]):  # rows that do not begin on 16 bytes are copied
        o = nsa_attention(rows, k, v, k_cmp, v_cmp, gates, config=SMALL, layout=layout)
        assert torch.equal(o if layout == "BHSD" else o.transpose(1, 2), expected)


def test_keys_of_the_window_alone(rng):
    import cupy

    x, other = (draw(rng, DTYPES["bfloat16"], 500, head_dim=64) for _ in range(2))
    x.gates[:] = [0, 0, 1]
    o = nsa_attention(*map(to_gpu, x), config=SMALL, k_win=to_gpu(other.k), v_win=to_gpu(other.v))
    expected = window_attention(*map(to_gpu, (x.q, other.k, other.v)), SMALL.window)
    assert cupy.asnumpy(o).tobytes() == cupy.asnumpy(expected).tobytes()


@pytest.mark.parametrize("config", [SMALL, LARGE, NSAConfig(top=5, window=130, path="portable")], ids=str)
def test_keys_of_the_window_beside_the_others(rng, config):
    """The selected branch keeps to k and v, in the blocks that the window passes too."""
    x, other = (draw(rng, DTYPES["bfloat16"], 700, head_dim=128, config=config) for _ in range(2))
    o, blocks = attend(x, config, k_win=to_gpu(other.k), v_win=to_gpu(other.v))
    assert whole_problems(o, x, blocks, config, other) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 256}, "head_dim is 256; accepted on the GPU: multiples of 8 up to 128"),
        ({"heads": 34, "kv_heads": 2}, "17 heads for each of k's; accepted on the GPU: up to 16"),
    ],
)
def test_what_no_kernel_takes(rng, options, message):
    with pytest.raises(ValueError, match=message):
        attend(draw(rng, DTYPES["bfloat16"], 100, **options), SMALL)
