"""Values that are not finite, huge or tiny, and garbage where nothing may look."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from key_lists import nowhere

from s2o_cupy import S2OConfig, s2o_attention_paged, s2o_attention_varlen

from .arrays import DEVICE, INF, NAN, attend, of_size, pages_of, paths, qkv, randn, same, sparse
from .exact import dense, wrong_dense
from .harness import Run, Skip, check

HEAD_DIMS = (64, 128, 256, 96)
DTYPES = (torch.bfloat16, torch.float16)


def grid(run: Run, *axes: Any) -> list[tuple[Any, ...]]:
    """All combinations, in an order of this seed's: whatever there is no time for is another each time."""
    found = list(itertools.product(*axes))
    run.rng("order").shuffle(found)
    return found[: of_size(len(found), 4)]


@check(40, shards=2, dry=True)
def not_finite_ahead(run: Run) -> str:
    """NaN, Inf or a huge value in a future key or value changes no bit of an earlier row, of o or of lse; of one of the
    same segment none but by the order of its sums."""
    S, segment = of_size(1500, 300), of_size(256, 64)
    cases = grid(run, paths(), HEAD_DIMS, DTYPES, (0.0, 0.05), (0, None))
    calls = 0
    for number in run.cases(len(cases)):
        path, D, dtype, tau, dense_up_to = cases[number]
        q, k, v = qkv(run.seed, 1, 2, 1, S, S, D, dtype)
        config = S2OConfig(tau=tau, segment=segment, path=path, dense_up_to=dense_up_to)
        clean = attend(q, k, v, config=config, return_lse=True)
        for spot in (S - 1, S - 8, S // 2 + 3, 129, 40, 15):
            # A segment's order, and with tau > 0 where it stops, depend on what its queries found among its own keys.
            rows = spot if dense_up_to is None else spot // segment * segment
            for value in (NAN, INF, -INF, 3e4):
                for which in (1, 2):
                    given = [q, k.clone(), v.clone()]
                    given[which][0, 0, spot, D // 2] = value
                    o, lse = attend(*given, config=config, return_lse=True)
                    calls += 1
                    where = f"{path}, {dtype}, head_dim {D}, tau {tau}, dense_up_to {dense_up_to}: {value} in "
                    where += f"{'qkv'[which]}[{spot}]"
                    assert same(o[:, :, :rows], clean[0][:, :, :rows]), f"{where} changes o before it"
                    assert same(lse[:, :, :rows], clean[1][:, :, :rows]), f"{where} changes lse before it"
                    if tau == 0:  # all keys are visited, in another order: weights and outputs of 16 bits round anew
                        off = (o - clean[0])[:, :, rows:spot].abs().amax() if spot > rows else 0
                        assert off <= 2**-7 * clean[0].abs().amax(), f"{where} changes o before it by {off}"
                    if tau == 0 and which == 1 and math.isnan(value):
                        assert bool(torch.isnan(o[:, :, spot:]).all()), f"{where} is lost"
                    if tau == 0 and which == 2 and not math.isfinite(value):
                        assert not bool(torch.isfinite(o[:, :, spot:, D // 2]).any()), f"{where} is lost"
                        others = [d for d in range(D) if d != D // 2]
                        assert bool(torch.isfinite(o[:, :, :, others]).all()), f"{where} reaches other columns"
    return f"{calls} calls"


@check(20, dry=True)
def huge_later_query(run: Run) -> str:
    """A later query of 6e4, Inf or NaN in the same warp changes no bit of the rows before it; tau 0."""
    S, calls = of_size(520, 100), 0
    cases = grid(run, paths(), HEAD_DIMS, DTYPES, (0, None), (6e4, INF, NAN))
    for number in run.cases(len(cases)):
        path, D, dtype, dense_up_to, value = cases[number]
        q, k, v = qkv(run.seed, 1, 16, 2, S, S, D, dtype)
        config = S2OConfig(tau=0, segment=128, path=path, dense_up_to=dense_up_to)
        clean = attend(q, k, v, config=config, return_lse=True)
        for spot in (S - 8, S // 2 + 9, 40, 15):
            later = q.clone()
            later[:, :, spot] = value
            # With candidates a segment's order is that of all its queries, and sums round in that order.
            rows = spot if dense_up_to is None else spot // 128 * 128
            found = attend(later, k, v, config=config, return_lse=True)
            for x, y in zip(found, clean, strict=True):
                where = f"{path}, {dtype}, head_dim {D}, dense_up_to {dense_up_to}: {value} in q[{spot}]"
                assert same(x[:, :, :rows], y[:, :, :rows]), f"{where} changes rows before it"
            calls += 1
    return f"{calls} calls"


@check(20, dry=True)
def large_and_small(run: Run) -> str:
    """Scores of 1e4, zeros, denormal numbers and maxima: finite, and near dense where it is well conditioned."""
    S = of_size(700, 150)
    cases = grid(run, paths(), HEAD_DIMS, DTYPES, (0.0, 0.05))
    for number in run.cases(len(cases)):
        path, D, dtype, tau = cases[number]
        half = dtype is torch.float16
        q, k, v = qkv(run.seed, 1, 2, 1, S, S, D, torch.float32)
        tiny, most = (3e-7, 65504.0) if half else (1e-39, 1e17)
        given = {
            "scores of 1e4": (q * 100, k * 100, v),
            "q of 0": (q * 0, k, v),
            "k of 0": (q, k * 0, v),
            "denormal v": (q, k, v * tiny),
            "denormal q": (q * tiny, k, v),
            "maxima": tuple(torch.full_like(x, most) for x in (q, k, v)),
            "huge v": (q, k, v.sign() * (6e4 if half else 1e30)),
        }
        for name, arrays in given.items():
            x = [t.to(dtype) for t in arrays]
            o, lse = attend(*x, config=sparse(tau=tau, segment=128, path=path), return_lse=True)
            where = f"{name}, {path}, {dtype}, head_dim {D}, tau {tau}"
            assert bool(torch.isfinite(o).all()) and bool(torch.isfinite(lse).all()), f"{where}: not finite"
            if tau == 0 and name in ("q of 0", "k of 0", "denormal q"):
                found = wrong_dense(o, lse, dense(*x))
                assert not found, f"{where}: {found}"
    return f"{len(cases)} kinds of 7 problems"


@check(10, dry=True)
def float16_maxima(run: Run) -> str:
    """v of 65504 everywhere gives 65504, though all weights are rounded up and so add up to more than 1."""
    grid_of = (torch.arange(1, 400, dtype=torch.float64) / 64).half().double()
    x, y = torch.meshgrid(grid_of, grid_of, indexing="ij")
    weight = torch.exp(-x * y)  # of a key -y for a query x; the one key 0 has 1
    gain = torch.where((weight > 0.05) & (weight < 1), weight.half().double() / weight - 1, 0.0)
    worst = gain.flatten().argmax()
    S = 257
    for path in paths():
        for D in (64, 128, 256):
            q = torch.zeros(1, 1, S, D, dtype=torch.float16, device=DEVICE)
            k = torch.zeros_like(q)
            q[..., 0], k[..., 0] = float(x.flatten()[worst]), -float(y.flatten()[worst])
            k[:, :, 0] = 0
            for tau in (0.0, 0.05):
                config = S2OConfig(tau=tau, path=path, segment=128, dense_up_to=0 if tau else None)
                o = attend(q, k, torch.full_like(q, 65504.0), scale=1.0, config=config)
                # Two units of float16 below is what rounding down may give.
                assert bool((o >= 65440).all()) and bool(torch.isfinite(o).all()), f"{path}, head_dim {D}, tau {tau}"
    return f"weights gain {float(gain.max()):.2e} by rounding"


@check(10, dry=True)
def scales(run: Run) -> str:
    """Scales of 0 and next to it are the mean; every cap is exact within its rounding."""
    q, k, v = qkv(run.seed, 1, 2, 1, of_size(300, 100))
    mean = dense(q, k, v, scale=0.0)
    tiny = (0.0, 1e-30, 1e-38, 2.0**-126, 2.0**-127, 1e-45, -1e-40, 1e-300)
    cases = grid(run, ("auto", "portable"), tiny, (0.0, 30.0, 1e6, 1e-3))  # Hopper by name takes none of these
    for number in run.cases(len(cases)):
        path, scale, softcap = cases[number]
        options = {"softcap": softcap, "return_lse": True, "config": sparse(tau=0, segment=128, path=path)}
        o, lse = attend(q, k, v, scale=scale, **options)
        found = wrong_dense(o, lse, mean)
        assert not found, f"scale {scale}, softcap {softcap}, {path}: {found}"
        if softcap:
            o, lse = attend(q, k, v, **options)
            found = wrong_dense(o, lse, dense(q, k, v, softcap=softcap), min(softcap, 30.0))
            assert not found, f"softcap {softcap}, {path}: {found}"
    return f"{len(cases)} combinations"


@check(5, dry=True)
def negative_bit(run: Run) -> str:
    """Tensors whose memory has the other sign (torch._neg_view), or is complex: read right, or refused."""
    q, k, v = qkv(run.seed, 1, 2, 1, 300, 300, 64, torch.float16)
    expected = attend(q, k, v, tau=0)
    notes = []
    for name, index in (("q", 0), ("k", 1), ("v", 2)):
        given = [q, k, v]
        given[index] = torch._neg_view(-given[index])
        assert given[index].is_neg()
        try:
            assert same(attend(*given, tau=0), expected), f"{name} with a negative bit is read with the wrong sign"
            notes.append(f"{name} is read")
        except (TypeError, ValueError) as error:
            assert "accepted" in str(error) and name in str(error), f"{name}: {error}"
            notes.append(f"{name} is refused")
    out = torch._neg_view(torch.zeros_like(q))
    try:
        attend(q, k, v, tau=0, out=out)
        assert same(out.resolve_neg(), expected), "out with a negative bit is written with the wrong sign"
        notes.append("out is written")
    except (TypeError, ValueError) as error:
        assert "accepted" in str(error), error
        notes.append("out is refused")
    return ", ".join(notes)


@check(10, dry=True)
def broadcast(run: Run) -> str:
    """Strides of 0 on each axis, alone and together, have the bits of contiguous clones."""
    calls = 0
    for path in paths():
        for D in (64, 128, 256):
            q, k, v = (randn(run.seed + i, 2, 4, of_size(500, 130), D, dtype=torch.bfloat16) for i in range(3))
            config = sparse(segment=128, path=path)
            for axis in (0, 1, 2):
                x = [t.narrow(axis, 0, 1).expand(t.shape) for t in (q, k, v)]
                for given in (x, [q, x[1], x[2]], [x[0], k, v]):
                    cloned = [t.clone(memory_format=torch.contiguous_format) for t in given]
                    assert same(attend(*given, config=config), attend(*cloned, config=config)), (path, D, axis)
                    calls += 1
    return f"{calls} calls"


@check(30, dry=True)
def garbage_in_pages(run: Run) -> str:
    """NaN, Inf or huge values wherever no key is, entries that lead nowhere: the bits of clean arrays."""
    cases = grid(run, paths(), (64, 128, 256, 80), (1, 2, 8, 16, 32, 64, 128, 256), (NAN, INF, 6e4))
    calls = 0
    for number in run.cases(len(cases)):
        path, D, size, junk = cases[number]
        rng = run.rng("pages", number)
        S = rng.choice([65, 130]) if of_size(0, 1) else rng.choice([65, 127, 128, 129, 300, 1000, 2049])
        q, k, v = qkv(number, 2, 4, 2, rng.choice([S, min(S, 70), 1]), S, D, rng.choice(DTYPES))
        unused, layout = rng.choice([-1, nowhere(size), -(1 << 31)]), rng.choice(["NHD", "HND"])
        made = pages_of(k, v, [S, S], size, rng, layout=layout, junk=junk, unused=unused)
        for tau, dense_up_to in ((0.0, 0), (0.05, 0), (0.0, None)):
            config = S2OConfig(tau=tau, segment=128, path=path, dense_up_to=dense_up_to)
            found = s2o_attention_paged(q, *made, seqlen_k=S, layout=layout, config=config, return_lse=True)
            expected = attend(q, k, v, config=config, return_lse=True)
            where = f"{path}, head_dim {D}, page size {size}, {junk}, seqlen_k {S}, tau {tau}"
            assert all(same(x, y) for x, y in zip(found, expected, strict=True)), where
            calls += 1
    return f"{calls} calls"


@check(15, dry=True)
def packed_neighbours(run: Run) -> str:
    """NaN in one packed sequence changes no bit of the others."""
    lengths = [1, 65, 128, 0, 200, 127, 3, of_size(600, 60)]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cases = grid(run, paths(), (64, 128, 256, 72), (0, 10_000))
    for number in run.cases(len(cases)):
        path, D, dense_up_to = cases[number]
        q, k, v = (randn(run.seed + i, starts[-1], 4, D, dtype=torch.bfloat16) for i in range(3))
        config = sparse(segment=64, path=path, dense_up_to=0 if path == "auto" else dense_up_to)
        clean = s2o_attention_varlen(q, k, v, starts, config=config)
        for bad in (0, 1, 4, 6):
            given = q.clone(), k.clone(), v.clone()
            for x in given:
                x[starts[bad] : starts[bad + 1]] = NAN
            o = s2o_attention_varlen(*given, starts, config=config)
            for rows in (slice(0, starts[bad]), slice(starts[bad + 1], None)):
                assert same(o[rows], clean[rows]), f"{path}, head_dim {D}, sequence {bad} reaches others"
    return f"{len(cases)} kinds"


@check(10, dry=True)
def nothing_and_little(run: Run) -> str:
    """Batch, heads or length of 0; no key; one token, which is its value."""
    for path in ("auto", "portable"):  # Hopper by name takes no head_dim of 1
        config = sparse(segment=128, path=path)
        for shape in ((0, 2, 10, 64), (2, 0, 10, 64), (2, 2, 0, 64)):
            q = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
            o, lse, stats = attend(q, q, q, config=config, return_lse=True, return_stats=True)
            assert o.shape == q.shape and lse.shape == q.shape[:3] and stats.density == 0, shape
        q, nothing = randn(1, 2, 4, 5, 64, dtype=torch.float16), randn(2, 2, 2, 0, 64, dtype=torch.float16)
        out = torch.full_like(q, NAN)
        _, lse = attend(q, nothing, nothing, config=config, is_causal=False, return_lse=True, out=out)
        assert bool((out == 0).all()) and bool(torch.isneginf(lse).all()), "no key: o is 0 and lse -inf"
        for D in (1, 7, 64, 129, 256):
            q, k, v = qkv(run.seed, 2, 4, 2, 1, 1, D)
            assert same(attend(q, k, v, config=config), v.repeat_interleave(2, 1)), f"one token, head_dim {D}"
    return "all shapes"


@check(15)
def many_heads(run: Run) -> str:
    """batch x heads of 65535, 65536 and 70000: more than a grid's second axis holds."""
    for B, H in ((65535, 1), (1, 65536), (700, 100)):
        for path in paths():
            if run.late():
                raise Skip("there was no time")
            q, k, v = qkv(B, B, H, max(1, H // 4), 24, 24, 8)
            config = S2OConfig(segment=8, tau=0, path=path, dense_up_to=0)
            o = attend(q, k, v, config=config, out=torch.full_like(q, NAN))
            found = wrong_dense(o, None, dense(q, k, v))
            assert not found, f"{B} x {H}, {path}: {found}"
    return "6 launches"
