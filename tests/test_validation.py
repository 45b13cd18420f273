"""Every call that is refused, with a message that names the argument, what came and what is accepted."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

from s2o_cupy import S2OConfig, S2OError, s2o_attention
from s2o_cupy.api.attention import parse_config
from s2o_cupy.problem import Problem, validate


def problem(q, k=None, v=None, *, dtypes=("float16",) * 3, backend="cupy", config=None, **options):
    k = q if k is None else k
    v = k if v is None else v
    return validate((q, k, v), dtypes, backend=backend, config=config or S2OConfig(), **options)


Q, K = (2, 8, 100, 64), (2, 2, 300, 64)


def test_a_problem_is_plain_numbers():
    assert problem(Q, K) == Problem(2, 8, 2, 100, 300, 64, "float16", True, 0.125)
    assert problem((2, 100, 8, 64), (2, 300, 2, 64), layout="BSHD") == problem(Q, K)
    assert problem(Q[1:], K[1:]).batch == 1
    assert problem((100, 8, 64), (300, 2, 64), layout="BSHD") == problem(Q[1:], K[1:])
    assert problem(Q, K, is_causal=np.False_).is_causal is False
    assert problem(Q, K, scale=np.float32(0.5)).scale == 0.5


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((64,), K, K, "q has 1 axes, shape (64,); accepted: 4 axes (BHSD) or 3 (HSD;"),
        (Q, (1, *K), (1, *K), "k has 5 axes"),
        (Q, K[1:], K[1:], "q, k and v have 4, 3, 3 axes; accepted: the same number"),
        (Q, K, (2, 2, 301, 64), "k is (2, 2, 300, 64) and v is (2, 2, 301, 64)"),
        (Q, K, (2, 2, 300, 32), "accepted: the same shape for both"),
        (Q, (3, *K[1:]), None, "q has batch 2, k and v have 3; accepted: the same batch"),
        (Q, (2, 2, 300, 32), None, "q has head_dim 64, k and v have 32"),
        (Q, (2, 3, 300, 64), None, "q has 8 heads, k and v have 3; accepted: heads a multiple of kv_heads"),
        (Q, (2, 0, 300, 64), None, "q has 8 heads, k and v have 0"),
        (Q, (2, 2, 99, 64), None, "seqlen_q 100 exceeds seqlen_k 99; accepted with is_causal=True: seqlen_k"),
        ((2, 8, 100, 0), (2, 2, 300, 0), None, "head_dim is 0; accepted: 1 to 256"),
        ((2, 8, 100, 257), (2, 2, 300, 257), None, "head_dim is 257; accepted: 1 to 256 (the limit)"),
        ((2, 8, 100, 512), (2, 2, 300, 512), None, "head_dim is 512; accepted: 1 to 256 (the limit)"),
        (Q, (2, 2, 2**31, 64), None, "seqlen_k is 2147483648; accepted: up to 2147467264"),
    ],
)
def test_shapes(q, k, v, message):
    for backend in ("cupy", "numpy"):
        with pytest.raises(ValueError, match=re.escape(message)):
            problem(q, k, v, backend=backend)


def test_bottom_right_is_named():
    with pytest.raises(ValueError, match="bottom-right"):
        problem((1, 1, 2, 64), (1, 1, 1, 64))
    assert problem((1, 1, 2, 64), (1, 1, 1, 64), is_causal=False).seqlen_k == 1


def test_dtypes_of_each_backend():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert problem(Q, K, dtypes=[dtype] * 3, backend="numpy").dtype == dtype
    for dtype in ("float16", "bfloat16"):
        assert problem(Q, K, dtypes=[dtype] * 3).dtype == dtype
    for dtype in ("float32", "float64"):
        with pytest.raises(TypeError, match=rf'{dtype}; accepted.*float16, bfloat16.*cast.*backend="numpy"'):
            problem(Q, K, dtypes=[dtype] * 3)
    for backend in ("cupy", "numpy"):
        with pytest.raises(TypeError, match=r"are int32; accepted on backend"):
            problem(Q, K, dtypes=["int32"] * 3, backend=backend)
        with pytest.raises(TypeError, match=r"q float16, k bfloat16, v float16; accepted: one dtype"):
            problem(Q, K, dtypes=["float16", "bfloat16", "float16"], backend=backend)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_scale_is_finite(scale):
    with pytest.raises(ValueError, match=r"scale is -?(nan|inf); accepted: a finite number"):
        problem(Q, K, scale=scale)


def test_softcaps():
    assert problem(Q, K).softcap == problem(Q, K, softcap=0).softcap == 0.0
    assert problem(Q, K, softcap=np.float32(50)).softcap == 50.0


@pytest.mark.parametrize("softcap", [float("nan"), float("inf"), -1.0, 1e-4, 2e6, 10**400])
def test_softcaps_out_of_range(softcap):
    with pytest.raises(ValueError, match=r"softcap is .*; accepted: 0 \(off\), or a number from 0.001 to 1e\+06"):
        problem(Q, K, softcap=softcap)


@pytest.mark.parametrize("softcap", ["1", True, None, 1j, np.ones(1)])
def test_softcaps_that_are_no_numbers(softcap):
    with pytest.raises(TypeError, match=r"softcap is .*; accepted: 0 \(off\), or a number"):
        problem(Q, K, softcap=softcap)


@pytest.mark.parametrize("scale", ["1", True, 1j, np.ones(1)])
def test_scale_is_a_number(scale):
    with pytest.raises(TypeError, match=r"scale is .*; accepted: a finite Python number"):
        problem(Q, K, scale=scale)


@pytest.mark.parametrize("is_causal", [None, 1, "yes", np.ones(2, bool)])
def test_is_causal_is_a_bool(is_causal):
    with pytest.raises(TypeError, match="is_causal is .*; accepted: True or False"):
        problem(Q, K, is_causal=is_causal)


@pytest.mark.parametrize("layout", ["bhsd", "SBHD", None, 4, np.array(["BHSD", "BSHD"]), np.array("BHSD"), ["BHSD"]])
def test_layout(layout):
    with pytest.raises(ValueError, match=r"layout is .*; accepted: 'BHSD' or 'BSHD'"):
        problem(Q, K, layout=layout)


def test_gpu_tiles():
    for block_m in (64, 128):
        problem(Q, K, config=S2OConfig(block_m=block_m))
    for block_n in range(64, 1025, 64):
        problem(Q, K, config=S2OConfig(block_n=block_n))
    for block_m in (7, 32, 96, 256):
        with pytest.raises(ValueError, match=rf"block_m is {block_m}; accepted on the GPU: 64 or 128"):
            problem(Q, K, config=S2OConfig(block_m=block_m))
    for block_n in (7, 32, 100, 1000):
        with pytest.raises(ValueError, match=rf"block_n is {block_n}; accepted on the GPU: multiples of 64"):
            problem(Q, K, config=S2OConfig(block_n=block_n))


@pytest.mark.parametrize("name", ["block_m", "block_n"])
def test_cpu_tiles(name):
    """What the GPU takes, and smaller ones; but no size that no GPU could ever have."""
    for size in (*range(16, 129, 16), 192, 1024):
        problem(Q, K, config=S2OConfig(**{name: size}), backend="numpy")
    for size in (1, 7, 8, 24, 100, 1000):
        with pytest.raises(ValueError, match=f"{name} is {size}; accepted on the CPU: multiples of 16 up to 1024"):
            problem(Q, K, config=S2OConfig(**{name: size}), backend="numpy")


@pytest.mark.parametrize("path", ["portable", "hopper"])
def test_a_path_by_name_is_refused_on_the_cpu(qkv, path):
    config = S2OConfig(path=path)
    with pytest.raises(ValueError, match=f"path is '{path}', which names GPU kernels.*; accepted there: 'auto'"):
        s2o_attention(*qkv(10), config=config)
    assert problem(Q, K, config=config).dtype == "float16"  # whether that GPU has the path, its plan says


# -- the axes in the other order --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((1, 4096, 32, 128), (1, 4096, 8, 128)),  # 32 queries would see 8 keys
        ((1, 512, 32, 128), (1, 4096, 8, 128)),  # 512 heads would share 4,096
        ((512, 32, 128), (4096, 8, 128)),
    ],
)
def test_bshd_given_as_bhsd_is_asked_about(q, k):
    for backend in ("cupy", "numpy"):
        with pytest.raises(ValueError, match=r"accepted.*\. Did you mean layout='BSHD'\? These shapes fit it"):
            problem(q, k, backend=backend)
        problem(q, k, backend=backend, layout="BSHD")


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((1, 8, 100, 64), (1, 8, 50, 64)),  # would be 100 heads of 50, of 8 tokens: not likely
        ((1, 32, 4096, 128), (1, 5, 4096, 128)),  # wrong in either order
        ((2, 100, 7, 64), (2, 300, 2, 64)),  # 7 heads would share 2
    ],
)
def test_other_wrong_shapes_are_not(q, k):
    with pytest.raises(ValueError, match="accepted") as error:
        problem(q, k)
    assert "BSHD" not in str(error.value)


# -- through the public call ----------------------------------------------------------------------


@pytest.mark.parametrize("tau", [-1e-9, -1, float("nan"), -float("inf")])
def test_tau_range(device, qkv, tau):
    given = [device.array(x) for x in qkv(10)]
    with pytest.raises(ValueError, match=r"s2o_attention: tau is .*; accepted: a number >= 0"):
        s2o_attention(*given, tau=tau)


@pytest.mark.parametrize("tau", ["0.1", True, ["0.1"], {0: 0.1}])
def test_tau_type(qkv, tau):
    with pytest.raises(TypeError, match=r"s2o_attention: tau(\[0\])? is .*; accepted: a number >= 0"):
        s2o_attention(*qkv(10), tau=tau)


@pytest.mark.parametrize("tau", [np.float32(0.25), np.float64(0.25), np.float16(0.25)])
def test_tau_is_any_real_number(tau):
    config = S2OConfig(tau=tau)
    assert config == S2OConfig(tau=0.25) and type(config.tau) is float


def test_config_type(qkv):
    with pytest.raises(TypeError, match="config is a dict; accepted: S2OConfig or None"):
        s2o_attention(*qkv(10), config={"segment": 10})  # type: ignore[arg-type]


def test_backend(qkv):
    with pytest.raises(ValueError, match=r"backend is 'cuda'; accepted: 'auto', 'cupy', 'numpy'"):
        s2o_attention(*qkv(10), backend="cuda")
    with pytest.raises(ValueError, match=r'backend is "cupy", but q, k and v are on the CPU.*cupy.asarray'):
        s2o_attention(*qkv(10), backend="cupy")


def test_stream_on_the_cpu(qkv):
    with pytest.raises(ValueError, match="stream is given, but q, k and v are on the CPU"):
        s2o_attention(*qkv(10), stream=0)


def test_a_tau_finds_its_config_again():
    """Making a config, with its checks, would be a third of what a call costs the host."""
    mine = S2OConfig(segment=64, rank="mean")
    assert parse_config(None, None) == S2OConfig()
    assert parse_config(mine, None) is mine
    assert parse_config(mine, 0.5) == replace(mine, tau=0.5)
    assert parse_config(S2OConfig(segment=64, rank="mean"), 0.5) is parse_config(mine, 0.5)
    assert parse_config(None, 1) == S2OConfig(tau=1.0)


@pytest.mark.parametrize("tau", [None, 0.5])
def test_statistics_have_the_config_that_was_given(qkv, tau):
    """Equal ones may differ in which fields are defaults, which `replace` finds anew."""
    for _ in range(2):
        for config in (S2OConfig(), S2OConfig(segment=128)):
            _, stats = s2o_attention(*qkv(10), tau=tau, config=config, return_stats=True)
            assert replace(stats.config, rank="mean").segment == replace(config, rank="mean").segment


def test_statistics_are_themselves_alone(qkv):
    one, other = (s2o_attention(*qkv(10), return_stats=True)[1] for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2


@pytest.mark.parametrize(
    "given",
    [
        lambda x: S2OConfig(rank=x), lambda x: S2OConfig(path=x), lambda x: S2OConfig(tail=x),
        lambda x: s2o_attention(*np.ones((3, 1, 1, 2, 8), np.float32), backend=x),
    ],
)  # fmt: skip
@pytest.mark.parametrize("x", [np.array(["auto", "query"]), ["query"], np.array([1, 2])], ids=str)
def test_an_array_is_no_name(given, x):
    with pytest.raises(ValueError, match=r"(rank|path|tail|backend) is .*; accepted: "):
        given(x)


@pytest.mark.parametrize("bad", [None, 1.0, [[1.0]], "q", np.float32(1)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_not_an_array(qkv, bad, name):
    given = dict(zip("qkv", qkv(10), strict=True)) | {name: bad}
    with pytest.raises(TypeError, match=rf": {name} is a {type(bad).__name__}; accepted: NumPy, CuPy"):
        s2o_attention(**given)


def test_masked_arrays(qkv):
    q, k, v = qkv(10)
    with pytest.raises(TypeError, match="k is a masked array"):
        s2o_attention(q, np.ma.masked_array(k), v)


def test_mixed_dtypes(device, qkv):
    q, k, v = (device.array(x) for x in qkv(10))
    other = np.float16 if device.dtype != np.float16 else np.float32
    with pytest.raises(TypeError, match=r"dtypes differ: q .*, k .*, v .*; accepted: one dtype"):
        s2o_attention(q, k.astype(other), v)


@pytest.mark.gpu
def test_mixed_devices(device, qkv):
    if device.kind == "cpu":
        pytest.skip("needs a GPU beside the CPU")
    q, k, v = (device.array(x) for x in qkv(10))
    with pytest.raises(TypeError, match=r"q CuPy, k NumPy, v CuPy; accepted: one framework"):
        s2o_attention(q, k.get(), v)


# -- out ------------------------------------------------------------------------------------------


def test_out_of_another_shape_or_dtype(device, qkv):
    q, k, v = (device.array(x) for x in qkv(10))
    with pytest.raises(ValueError, match=r"out has shape \(1, 2, 9, 64\); accepted: \(1, 2, 10, 64\)"):
        s2o_attention(q, k, v, out=q[:, :, :9].copy())
    with pytest.raises(ValueError, match=r"out has shape \(2, 10, 64\)"):
        s2o_attention(q, k, v, out=q[0].copy())
    with pytest.raises(TypeError, match=rf"out is float64; accepted: {device.dtype.name}"):
        s2o_attention(q, k, v, out=q.astype(np.float64))
    with pytest.raises(TypeError, match="out is a list; accepted"):
        s2o_attention(q, k, v, out=[])


def test_out_that_cannot_be_written(device, qkv):
    q, k, v = (device.array(x) for x in qkv(10))
    if device.kind == "cpu":
        out = q.copy()
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            s2o_attention(q, k, v, out=out)
    strided = device.xp.repeat(q, 2, axis=-1)[..., ::2]
    with pytest.raises(ValueError, match="accepted: a contiguous last axis"):
        s2o_attention(q, k, v, out=strided)
    as_strided = device.xp.lib.stride_tricks.as_strided
    for strides in ((0, 0, 0), (0, 640, 64), (1280, 64, 32), (1280, -320, 64)):  # in elements
        pool = device.xp.zeros(10_000, device.dtype)
        itemsize = device.dtype.itemsize
        out = as_strided(pool[5000:], q.shape, (*(s * itemsize for s in strides), itemsize))
        if strides == (0, 640, 64):  # a stride of 0 over one batch entry hides nothing
            s2o_attention(q, k, v, out=out)
            continue
        with pytest.raises(ValueError, match="put several elements in one place"):
            s2o_attention(q, k, v, out=out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shift", [0, 1, -1, 100])
def test_out_that_overlaps_an_input(device, qkv, name, shift):
    q, k, v = qkv(50, kv_heads=2)
    buffer = device.array(np.zeros(q.size + 200))
    view = buffer[100 : 100 + q.size].reshape(q.shape)
    out = buffer[100 + shift : 100 + shift + q.size].reshape(q.shape)
    given = {n: device.array(x) for n, x in zip("qkv", (q, k, v), strict=True)} | {name: view}
    with pytest.raises(ValueError, match=f"out and {name} overlap in memory"):
        s2o_attention(**given, out=out)


def test_out_that_overlaps_an_input_seen_backwards(device, qkv):
    q, k, v = (device.array(x) for x in qkv(50, kv_heads=2))
    with pytest.raises(ValueError, match="out and v overlap in memory"):
        s2o_attention(q, k, v[:, :, ::-1], out=v)


def test_out_beside_an_input_in_one_buffer(device, qkv):
    host = qkv(50)
    q, k, v = (device.array(x) for x in host)
    buffer = device.array(np.zeros(2 * q.size))
    first, second = buffer[: q.size].reshape(q.shape), buffer[q.size :].reshape(q.shape)
    first[...] = q
    s2o_attention(first, k, v, out=second)
    np.testing.assert_array_equal(device.host(second), device.host(s2o_attention(q, k, v)))


def test_a_refused_call_writes_nothing(device, qkv):
    q, k, v = (device.array(x) for x in qkv(10))
    out = device.poisoned(q.shape)
    with pytest.raises(ValueError, match="scale"):
        s2o_attention(q, k, v, out=out, scale=float("nan"))
    assert np.isnan(device.host(out)).all()


def test_errors_are_of_three_kinds():
    assert issubclass(S2OError, RuntimeError)
    assert not issubclass(S2OError, (ValueError, TypeError))


def test_a_default_follows_the_rank_and_a_given_value_stays():
    fields_of = lambda config: (config.segment, config.unit, config.pooled_queries)  # noqa: E731
    assert fields_of(S2OConfig()) == (128, 8, 128) and fields_of(S2OConfig(segment=512)) == (512, 8, 512)
    for config in (S2OConfig(), S2OConfig(rank="max"), S2OConfig(rank="mean")):
        ranks = [fields_of(replace(config, rank=rank)) for rank in ("weight", "max", "mean")]
        assert ranks == [(128, 16, 16), (1024, 1, 16), (1024, 1, 1)]
    config = S2OConfig(segment=512)
    ranks = [fields_of(replace(config, rank=rank)) for rank in ("weight", "max", "mean")]
    assert ranks == [(512, 16, 64), (512, 1, 16), (512, 1, 1)]
    config = S2OConfig(rank="weight")
    assert [replace(config, segment=n).pooled_queries for n in (1, 8, 9, 100, 2048, 8192)] == [1, 1, 2, 13, 256, 256]
    assert replace(S2OConfig(rank="max"), segment=10).pooled_queries == 10
    with pytest.raises(ValueError, match="pooled_queries is 256 with rank='mean'"):
        replace(S2OConfig(pooled_queries=256), rank="mean")
    with pytest.raises(ValueError, match="unit is 16 with rank='max'; accepted: 1, or rank='query' or 'weight'"):
        replace(S2OConfig(unit=16), rank="max")


@pytest.mark.parametrize("make", [lambda x: x, copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {"pooled_queries": 16}),
        ({"pooled_queries": 16}, {"pooled_queries": None}),
        ({"pooled_queries": 16}, {"segment": 512}),
        ({"rank": "weight"}, {"rank": None}),
        ({"segment": 128}, {"rank": "mean"}),  # is the default, but was given
        ({}, {"segment": 128, "rank": "mean"}),
        ({"clusters": 2}, {"rank": "weight", "clusters": None}),
        ({"segment": 64, "tau": 0.3}, {"window": 5, "rank": "max"}),
    ],
    ids=str,
)
def test_replace_is_a_config_of_what_was_given(make, given, changes):
    """A default among it is found anew, the rank's too; copies know what was given."""
    config = make(S2OConfig(**given))
    assert replace(config, **changes) == S2OConfig(**{**given, **changes})
    assert replace(replace(config, tau=0.1), **changes) == S2OConfig(**{**given, "tau": 0.1, **changes})


def test_a_default_of_another_config_is_given():
    other = S2OConfig()
    assert S2OConfig(segment=other.segment, rank="mean").segment == S2OConfig(other.segment, rank="mean").segment == 128
    with pytest.raises(ValueError, match="pooled_queries is 16 with rank='query'"):
        S2OConfig(rank=other.rank, pooled_queries=16)
    with pytest.raises(ValueError, match="pooled_queries is 128 with rank='query'"):
        replace(S2OConfig(pooled_queries=other.pooled_queries, rank="query"), segment=64)


def test_replace_refuses_what_a_config_of_it_refuses():
    for given, changes in (
        ({"rank": "query"}, {"pooled_queries": 16}), ({"clusters": 2}, {"rank": "weight"}),
        ({"clusters": 2}, {"pooled_queries": 16}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"; accepted: None, or rank=") as expected:
            S2OConfig(**given, **changes)
        with pytest.raises(ValueError, match=re.escape(str(expected.value))):
            replace(S2OConfig(**given), **changes)


def test_each_query_by_itself_unless_means_are_asked_for():
    assert (S2OConfig().rank, S2OConfig(pooled_queries=16).rank) == ("query", "weight")
    with pytest.raises(ValueError, match="pooled_queries is 16 with rank='query', where each of the segment's 128"):
        S2OConfig(rank="query", pooled_queries=16)
    assert [S2OConfig(rank=rank).clusters for rank in ("query", "weight", "max", "mean")] == [8, 0, 0, 0]
    with pytest.raises(ValueError, match="clusters is 3 with rank='query'; accepted: 2 or 4 or 8"):
        S2OConfig(clusters=3)
    with pytest.raises(ValueError, match="clusters is 4 with rank='weight'; accepted: None, or rank='query'"):
        S2OConfig(rank="weight", clusters=4)


def test_the_rest_counts_by_default_where_each_query_is_by_itself():
    """And tau is then larger; a number that is given stays."""
    adds = {rank: S2OConfig(rank=rank).adds_tail for rank in ("query", "weight", "mean")}
    assert adds == {"query": True, "weight": False, "mean": False}
    assert not S2OConfig(error=0.1).adds_tail and not S2OConfig(tau=0).adds_tail
    assert (S2OConfig().tau_of(100), S2OConfig().tau_of(1 << 17)) == (0.1, 0.05)
    assert S2OConfig(tail="none").tau_of(100) == S2OConfig(rank="weight").tau_of(100) == 0.02
    assert S2OConfig(rank="weight", tail="first_order").tau_of(100) == 0.02
    assert S2OConfig(tau=0.3).tau_of(1 << 17) == 0.3


@pytest.mark.parametrize("unit", [3, 48, 256, 1 << 40])
def test_units_are_powers_of_two(unit):
    match = rf"unit is {unit} with rank='query'; accepted: 1, 2, 4, 8, 16, 32, 64, 128$"
    with pytest.raises(ValueError, match=match):
        S2OConfig(unit=unit)


def test_the_rank_of_before_is_refused():
    with pytest.raises(ValueError, match="rank is 'auto'; accepted: 'query', 'weight', 'max', 'mean'"):
        S2OConfig(rank="auto")


@pytest.mark.parametrize("name", ["tau", "error"])
def test_numbers_beyond_a_float(name):
    with pytest.raises(ValueError, match=rf"^S2OConfig: {name} is beyond what a float holds; accepted: "):
        S2OConfig(**{name: 10**400})
