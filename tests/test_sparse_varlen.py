"""Packed and paged sequences by schedules and by methods: the bits of each sequence's own call in one array."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import has_gpu
from pages import paged, random_table
from schedules import FRAMEWORKS, random_schedule

from s2o_cupy import S2OConfig, Schedule, gather_attention, gather_attention_varlen, s2o_attention
from s2o_cupy.methods import (
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    sparse_attention,
    sparse_attention_paged,
    sparse_attention_varlen,
)

CONFIGS = [MeanPoolingConfig(threshold=0.5), PBSConfig(threshold=0.5), SpargeConfig(tau=0.7, theta=-1, value_skip=-1.0)]
STARTS_Q, STARTS_K = [0, 300, 300, 350, 420, 1100], [0, 500, 510, 700, 800, 1600]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def array(request):
    """From NumPy's float32 to arrays of the device."""
    if request.param == "cpu":
        return lambda x: x.astype(np.float32)
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    import cupy

    return lambda x: cupy.asarray(x.astype(np.float16) if x.dtype.kind == "f" else x)


def host(x):
    return x.get() if hasattr(x, "get") else np.asarray(x)


def packed_arrays(rng, array):
    return [array(rng.standard_normal((n, heads, 64))) for n, heads in ((1100, 4), (1600, 2), (1600, 2))]


def of_sequence(q, k, v, i):
    rows, keys = slice(*STARTS_Q[i : i + 2]), slice(*STARTS_K[i : i + 2])
    return q[rows], k[keys], v[keys]


def assert_same(x, y):
    assert host(x).tobytes() == host(y).tobytes()


def test_a_schedule_for_each_sequence(rng, array):
    q, k, v = packed_arrays(rng, array)
    to = (lambda x: x) if isinstance(q, np.ndarray) else type(q)
    if not isinstance(q, np.ndarray):
        import cupy

        to = cupy.asarray
    schedules = [
        random_schedule(rng, 300, 500, list_heads=4, unit=64, segment=128, array=to),
        None,
        None,
        random_schedule(rng, 70, 100, list_heads=2, segment=128, array=to),
        random_schedule(rng, 680, 800, list_heads=1, unit=128, segment=256, sinks=3, order=(1, 2), array=to),
    ]
    o, lse, stats = gather_attention_varlen(
        q, k, v, STARTS_Q, schedules, STARTS_K, return_lse=True, return_stats=True, scale=0.2
    )
    assert o.shape == q.shape and lse.shape == (4, 1100) and len(stats) == 5
    for i, schedule in enumerate(schedules):
        arrays = of_sequence(q, k, v, i)
        if schedule is None:
            expected = s2o_attention(*arrays, tau=0, layout="BSHD", return_lse=True, scale=0.2)
        else:
            expected = gather_attention(*arrays, schedule, layout="BSHD", return_lse=True, scale=0.2)
            assert stats[i].density == pytest.approx(expected_density(arrays, schedule))
        rows = slice(*STARTS_Q[i : i + 2])
        assert_same(o[rows], expected[0])
        assert_same(lse[:, rows], expected[1])
    out = type(q)(q.shape, q.dtype)
    assert gather_attention_varlen(q, k, v, STARTS_Q, schedules, STARTS_K, scale=0.2, out=out) is out
    assert_same(out, o)


def expected_density(arrays, schedule):
    return gather_attention(*arrays, schedule, layout="BSHD", return_stats=True)[1].density


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_a_method_on_packed_sequences(rng, array, config):
    q, k, v = packed_arrays(rng, array)
    o, stats = sparse_attention_varlen(q, k, v, STARTS_Q, STARTS_K, config=config, dense_up_to=100, return_stats=True)
    assert len(stats) == 5
    for i in (0, 2, 3, 4):
        arrays = of_sequence(q, k, v, i)
        if len(arrays[1]) <= 100:
            expected = s2o_attention(*arrays, tau=0, layout="BSHD")
        else:
            expected, of_call = sparse_attention(*arrays, config=config, layout="BSHD", return_stats=True)
            assert stats[i].density == of_call.density and stats[i].value_density == of_call.value_density
        assert_same(o[slice(*STARTS_Q[i : i + 2])], expected)


def test_dense_sequences_take_the_methods_path(rng):
    q, k, v = packed_arrays(rng, np.asarray)
    with pytest.raises(ValueError, match="config.path is 'portable', which names GPU kernels"):
        sparse_attention_varlen(
            q, k, v, STARTS_Q, STARTS_K, config=MeanPoolingConfig(path="portable"), dense_up_to=10_000
        )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, rng):
    framework = FRAMEWORKS[name]()
    q, k, v = packed_arrays(rng, lambda x: framework.array(x.astype(np.float32)))
    o, lse = sparse_attention_varlen(q, k, v, STARTS_Q, STARTS_K, config=CONFIGS[0], return_lse=True)
    assert isinstance(o, framework.kind) and isinstance(lse, framework.kind)
    exact = sparse_attention_varlen(*(np.asarray(x) for x in (q, k, v)), STARTS_Q, STARTS_K, config=CONFIGS[0])
    np.testing.assert_array_equal(np.asarray(o), exact)


def test_no_sequences_and_an_s2o_config(rng, array):
    q, k, v = packed_arrays(rng, array)
    o, lse = sparse_attention_varlen(q[:0], k[:0], v[:0], [0], config=CONFIGS[0], return_lse=True)
    assert o.shape == (0, 4, 64) and lse.shape == (4, 0)
    config = S2OConfig(tau=0.1)
    o = sparse_attention_varlen(q, k, v, STARTS_Q, STARTS_K, config=config)
    assert_same(o[420:], s2o_attention(*of_sequence(q, k, v, 4), config=config, layout="BSHD"))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("config", [*CONFIGS, S2OConfig(tau=0.05, dense_up_to=0)], ids=lambda c: type(c).__name__)
def test_a_method_on_pages(rng, array, config, layout):
    """NaN stands wherever no key is, and tables lead nowhere past the last page."""
    q, k, v = (rng.standard_normal((2, heads, n, 64)).astype(np.float32) for heads, n in ((4, 300), (2, 700), (2, 700)))
    table, pages = random_table(rng, [700] * 2, 16)
    caches = [array(paged(x, table, pages, 16, layout, [700] * 2)) for x in (k, v)]
    q, k, v = (array(x) for x in (q, k, v))
    to_table = np.asarray if isinstance(q, np.ndarray) else array
    o, lse, stats = sparse_attention_paged(
        q, *caches, to_table(table), seqlen_k=700, config=config, layout=layout, return_lse=True, return_stats=True
    )
    expected = sparse_attention(q, k, v, config=config, return_lse=True, return_stats=True)
    assert_same(o, expected[0])
    assert_same(lse, expected[1])
    assert stats.density == expected[2].density


def test_pages_without_a_key(rng, array):
    q, pages = (array(rng.standard_normal(shape)) for shape in ((1, 4, 30, 64), (3, 16, 2, 64)))
    table = array(np.zeros((1, 2))).astype(np.int32)
    of_pages = {"seqlen_k": 0, "is_causal": False, "return_lse": True}
    for config in (CONFIGS[0], S2OConfig()):
        o, lse = sparse_attention_paged(q, pages, pages, table, config=config, **of_pages)
        assert o.shape == q.shape and not o.any() and (lse == -np.inf).all()


def test_an_output_is_checked_as_a_whole(rng):
    """One that is longer, and one whose first rows lie on keys that a later turn reads."""
    memory = rng.standard_normal((800, 2, 64))
    q, k, v = rng.standard_normal((3, 300, 2, 64))
    for out, message in (
        (np.zeros((400, 2, 64)), r"out has shape \(400, 2, 64\); accepted: \(300, 2, 64\)"),
        (memory[200:500], "out and k overlap in memory"),
    ):
        before = out.copy()
        keys = memory[:300] if out.base is memory else k
        with pytest.raises(ValueError, match=f"^sparse_attention_varlen: {message}"):
            sparse_attention_varlen(q, keys, v, [0, 100, 300], config=CONFIGS[0], out=out)
        np.testing.assert_array_equal(out, before)


@pytest.mark.parametrize("config", [5, SpargeConfig(tau=(0.1, 0.2, 0.3), theta=-1)], ids=str)
def test_nothing_is_written_before_a_method_fits(rng, config):
    """Also where a dense sequence comes first, or all are dense."""
    q, k, v = rng.standard_normal((3, 300, 2, 64))
    out = np.zeros_like(q)
    with pytest.raises((TypeError, ValueError), match="config is a int|tau has 3 numbers; accepted: one, or 2"):
        sparse_attention_varlen(q, k, v, [0, 100, 300], config=config, dense_up_to=150, out=out)
    assert not out.any()
    with pytest.raises(TypeError, match="^sparse_attention_varlen: config is a int"):
        sparse_attention_varlen(q, k, v, [0, 100, 300], config=5, dense_up_to=300)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (S2OConfig(tau=[0.1] * 3), "tau has 3 numbers, q has 2 heads"),
        (S2OConfig(block_m=17), "config.block_m is 17"),
        (S2OConfig(segment=64, error=0.1), "config.error with is_causal=False and 4 segments"),
    ],
    ids=str,
)
def test_nothing_is_written_before_an_s2o_config_fits(rng, config, message):
    q, k, v = rng.standard_normal((3, 300, 2, 64))
    out = np.zeros_like(q)
    for dense_up_to in (150, 300) if config.error is None else (150,):
        with pytest.raises(ValueError, match=f"^sparse_attention_varlen: {message}"):
            sparse_attention_varlen(
                q, k, v, [0, 100, 300], config=config, dense_up_to=dense_up_to, out=out, is_causal=False
            )
        assert not out.any()


def test_a_schedule_says_whether_it_is_causal(rng):
    """Also where there are more queries than keys."""
    q, k, v = rng.standard_normal((3, 400, 2, 64))
    schedules = [random_schedule(rng, 200, 60, segment=128, is_causal=False), None]
    o = gather_attention_varlen(q[:300], k[:160], v[:160], [0, 200, 300], schedules, [0, 60, 160])
    first = gather_attention(q[:200], k[:60], v[:60], schedules[0], layout="BSHD")
    np.testing.assert_array_equal(o[:200], first)
    with pytest.raises(ValueError, match="sequence 1 has 100 queries and 60 keys; accepted with is_causal=True"):
        gather_attention_varlen(q[:300], k[:120], v[:120], [0, 200, 300], schedules, [0, 60, 120])


def test_nothing_is_written_before_all_lists_are_right(rng):
    q, k, v = rng.standard_normal((3, 300, 2, 64))
    wrong = Schedule.from_tokens(np.full((1, 1, 1, 1), 99), np.ones((1, 1, 1), int), seqlen_q=100, seqlen_k=100,
                                 segment=128)  # fmt: skip
    out = np.zeros_like(q)
    with pytest.raises(ValueError, match=r"^gather_attention_varlen: schedules\[1\]: list \[0, 0, 0\] .*"):
        gather_attention_varlen(q, k, v, [0, 200, 300], [random_schedule(rng, 200, 200, segment=128), wrong], out=out)
    assert not out.any()
    descending = Schedule.from_tokens(np.array([[[[3, 1]]]]), np.array([[[2]]]), seqlen_q=100, seqlen_k=100,
                                      is_causal=False, is_sorted=True)  # fmt: skip
    gather_attention_varlen(q, k, v, [0, 200, 300], [None, descending])  # as single calls take it


def test_nobody_asks_for_a_layout_that_there_is_not(rng, recwarn):
    """A sequence of fewer tokens than heads looks like an array of the other layout."""
    q, k, v = rng.standard_normal((3, 132, 8, 16))
    schedules = [random_schedule(rng, n, n, segment=128) for n in (128, 4)]
    gather_attention_varlen(q, k, v, [0, 128, 132], schedules)
    sparse_attention_varlen(q, k, v, [0, 128, 132], config=MeanPoolingConfig(threshold=0.5))
    assert not recwarn.list


def test_nothing_is_written_before_all_schedules_fit(rng):
    q, k, v = rng.standard_normal((3, 300, 2, 64))
    schedules = [random_schedule(rng, n, n, segment=128) for n in (200, 50)]
    out = np.zeros_like(q)
    with pytest.raises(ValueError, match=r"schedules\[1\] is for seqlen_q 50; accepted: 100"):
        gather_attention_varlen(q, k, v, [0, 200, 300], schedules, out=out)
    assert not out.any()


def test_what_is_refused(rng):
    q, k, v = packed_arrays(rng, lambda x: x.astype(np.float32))
    schedule = random_schedule(rng, 300, 500, segment=128)
    for call, error, message in (
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, schedule, STARTS_K), TypeError, "schedules is a Sche"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [1] * 5, STARTS_K), TypeError, r"schedules\[0\] is a int"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [None], STARTS_K), ValueError, "1 elements; accepted: 5"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [None] * 4 + [schedule], STARTS_K), ValueError,
         r"schedules\[4\] is for seqlen_q 300; accepted: 680"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [None] * 4 + [schedule], STARTS_K, is_causal=False),
         ValueError, r"is_causal is False, of schedules\[4\] True"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [None] * 5, STARTS_K, path="x"), ValueError, "path is 'x'"),
        (lambda: gather_attention_varlen(q, k, v, STARTS_Q, [None] * 5, STARTS_K, return_lse=1), TypeError,
         "return_lse is 1; accepted: True or False"),
        (lambda: gather_attention_varlen(q, k, v, [0, 5], [None], STARTS_K), ValueError, "cu_seqlens_q ends with 5"),
        (lambda: gather_attention_varlen(q[None], k, v, [0], []), ValueError, "q has 4 axes"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^gather_attention_varlen: .*{message}"):
            call()
    with pytest.raises(ValueError, match="^sparse_attention_varlen: dense_up_to is -1; accepted: an integer from 0"):
        sparse_attention_varlen(q, k, v, STARTS_Q, STARTS_K, config=CONFIGS[0], dense_up_to=-1)
    with pytest.raises(TypeError, match="^sparse_attention_varlen: config is a str; accepted: S2OConfig, Mean"):
        sparse_attention_varlen(q, k, v, STARTS_Q, STARTS_K, config="pbs")
    pages, table = np.zeros((3, 16, 2, 64), np.float32), np.zeros((1, 2), np.int32)
    of_pages = {"config": CONFIGS[0], "seqlen_k": 40}
    q1 = np.zeros((1, 4, 1, 64), np.float32)
    with pytest.raises(ValueError, match="^sparse_attention_paged: seqlen_k is 40, but page_table has 2 pages of 16"):
        sparse_attention_paged(q1, pages, pages, table, **of_pages)
    for changed, message in (
        ({"k_pages": pages[:, :0], "v_pages": pages[:, :0]}, "page"),
        ({"v_pages": pages[:2]}, "v_pages"),
        ({"v_pages": pages[0]}, "v_pages"),
        ({"page_table": table.astype(np.float32)}, "page_table"),
        ({"page_table": table + 3}, r"page_table\[0, 0\] is 3"),
    ):  # fmt: skip
        given = {"q": q1, "k_pages": pages, "v_pages": pages, "page_table": table, "seqlen_k": 30} | changed
        with pytest.raises((TypeError, ValueError), match=f"^sparse_attention_paged: .*{message}"):
            sparse_attention_paged(**given, config=PBSConfig())
    with pytest.raises(TypeError, match="^sparse_attention_paged: config is a int"):
        sparse_attention_paged(q, pages, pages, table, seqlen_k=4, config=3)
