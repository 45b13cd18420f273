"""Random problems on both paths: dense attention at tau 0, in bounds at a tau above, with guards around outputs.

A case is plain numbers, drawn from the seed and its number, so that `--case` repeats it.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.spec import CLUSTERS, UNITS

from .arrays import (
    DEVICE,
    DRY,
    NAN,
    OUT_PLACES,
    PLACES,
    capability,
    guard_is_intact,
    guarded_out,
    of_size,
    pages_of,
    paths,
    place,
    qkv,
    randn,
    same,
    synchronize,
    to_cupy,
    to_torch,
)  # fmt: skip
from .exact import Exact, dense, wrong_dense, wrong_sparse
from .harness import Run, check

Case = dict[str, Any]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_DIMS = (1, 2, 3, 7, 8, 16, 33, 40, 63, 65, 72, 80, 96, 100, 127, 129, 136, 160, 192, 200, 249, 250)
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 1023, 1024, 1025)
LONG = of_size(5000, 500)
MOST_SCORES = of_size(250_000_000, 1_500_000)  # of dense attention, which is what takes the time
CONFIG_FIELDS = (
    "segment", "block_m", "block_n", "rank", "unit", "pooled_queries", "clusters", "window", "tail", "workspace_bytes",
    "dense_up_to", "dense_last", "path",
)  # fmt: skip


def draw(rng: random.Random, mode: str) -> Case:
    """A random problem. ``mode``: "plain", "packed", "paged", or "ragged" (packed queries over pages)."""
    pick = rng.choice
    paged, packed = mode in ("paged", "ragged"), mode in ("packed", "ragged")
    D = pick([64, 128, 256]) if rng.random() < 0.45 else pick(HEAD_DIMS)
    c: Case = {"mode": mode, "values": rng.randrange(1 << 30), "dtype": pick(list(DTYPES))}
    c["D"] = max(8, D // 8 * 8) if paged else D
    c["Hk"], group = pick([1, 1, 2, 3]), pick([1, 1, 2, 4, 8])
    c["H"] = c["Hk"] * group
    c["is_causal"] = rng.random() < 0.75
    many = packed and rng.random() < 0.15
    sequences = rng.randint(129, 200) if many else pick([1, 2, 3, 5]) if packed or paged else 1
    longest = 100 if many else LONG
    c["lengths_k"] = [_length(rng, longest) for _ in range(sequences)]
    c["lengths_q"] = [_length_q(rng, n, longest, c["is_causal"]) for n in c["lengths_k"]]
    if not packed:
        c["B"] = pick([1, 1, 2, 3]) if mode == "plain" else sequences
        Sq = min(c["lengths_q"]) if c["is_causal"] else c["lengths_q"][0]
        c["lengths_q"] = [Sq] * c["B"]
        c["lengths_k"] = c["lengths_k"] if mode == "paged" else c["lengths_k"] * c["B"]
    while sum(c["H"] * a * b for a, b in zip(c["lengths_q"], c["lengths_k"], strict=True)) > MOST_SCORES:
        c["lengths_q"] = [n // 2 for n in c["lengths_q"]]
    short = max(c["lengths_q"]) <= 1500
    c["segment"] = pick([128, 128, 256, 512, 1000, 1024, *([16, 33, 64] if short else [300])])
    c["block_m"] = 128 if rng.random() < 0.7 else 64
    c["block_n"] = 128 if rng.random() < 0.7 else pick([64, 192, 1024])
    c["rank"] = pick(["query", "query", "query", "weight", "mean", "max"])
    c["unit"] = pick([None, None, *UNITS]) if c["rank"] in ("query", "weight") else None
    c["clusters"] = pick([None, None, *CLUSTERS]) if c["rank"] == "query" else None
    most = {"query": 0, "mean": 1, "max": 64, "weight": 256}[c["rank"]]
    c["pooled_queries"] = None if not most or rng.random() < 0.6 else rng.randint(1, most)
    c["window"] = pick([0, 0, 0, 0, 1, 50, 64, 300, 10**6])
    c["tail"] = pick(["first_order", "none"])
    c["workspace_bytes"] = pick([256 << 20, 256 << 20, 1 << 20])
    c["dense_up_to"] = 0 if rng.random() < 0.75 else pick([None, 300])
    c["dense_last"] = pick([None, None, 0, 150, 900])
    c["path"] = "auto" if DRY else pick(["auto", "auto", "portable"])
    c["scale"] = rng.choices([None, 0.05, 1.0, -0.1, 0.0], [70, 10, 8, 7, 5])[0]
    c["softcap"] = rng.choices([0.0, 2.0, 30.0], [78, 12, 10])[0]
    c["tau"] = pick([1e-4, 0.01, 0.1, 1.0, 1e30])
    c["kind"] = rng.choices(["model", "normal", "equal keys", "zero queries", "needles"], [60, 25, 5, 5, 5])[0]
    c["places"] = [pick(PLACES if mode == "plain" else PLACES[:4]) for _ in range(3)]
    c["out"] = pick(OUT_PLACES if mode in ("plain", "packed") else OUT_PLACES[:4])  # paged rows start on 16 bytes
    c["layout"] = pick(["BHSD", "BSHD"])  # of a plain call
    c["page_size"], c["page_layout"] = pick([1, 2, 4, 8, 16, 32, 64, 128, 256]), pick(["NHD", "HND"])
    return c


def _length(rng: random.Random, longest: int) -> int:
    x = rng.random()
    if x < 0.25:
        return min(longest, rng.choice(LENGTHS))
    return rng.randint(1, min(longest, 300)) if x < 0.5 else rng.randint(1, longest)


def _length_q(rng: random.Random, seqlen_k: int, longest: int, is_causal: bool) -> int:
    if not is_causal:
        return rng.choice([1, 129, rng.randint(0, longest)])
    return seqlen_k if rng.random() < 0.55 else min(seqlen_k, rng.choice([1, 2, 65, 128, rng.randint(0, seqlen_k)]))


def config_of(c: Case, tau: float) -> S2OConfig:
    return S2OConfig(tau=tau, **{name: c[name] for name in CONFIG_FIELDS})


def values_of(c: Case, B: int, Sq: int, Sk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    H, Hk, D, dtype, seed = c["H"], c["Hk"], c["D"], DTYPES[c["dtype"]], c["values"]
    if c["kind"] == "normal":
        sizes = ((H, Sq), (Hk, Sk), (Hk, Sk))
        q, k, v = (randn(seed + i, B, h, s, D, dtype=dtype) for i, (h, s) in enumerate(sizes))
        return q, k, v
    q, k, v = qkv(seed, B, H, Hk, Sq, Sk, D, dtype)
    if c["kind"] == "equal keys" and Sk:
        k = k[:, :, :1].expand(k.shape).contiguous()
    elif c["kind"] == "zero queries":
        q = torch.zeros_like(q)
    elif c["kind"] == "needles" and Sk:  # a few keys hold nearly all of the mass
        k[:, :, :: max(1, Sk // 5)] *= 4
    return q, k, v


def wrong_rows(c: Case, tau: float, o: torch.Tensor, lse: torch.Tensor, exact: Exact, v: torch.Tensor) -> list[str]:
    """What is wrong with the rows o [B, H, Sq, D] and lse [B, H, Sq] of keys with the values v [B, Hk, Sk, D]."""
    if tau == 0:
        return wrong_dense(o, lse, exact, c["softcap"])
    return wrong_sparse(o, lse, exact, v, c["tail"], c["softcap"])


def options_of(c: Case, tau: float) -> dict[str, Any]:
    shared = {name: c[name] for name in ("scale", "softcap", "is_causal")}
    return {"config": config_of(c, tau), "return_lse": True, **shared}


def exact_of(c: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    return dense(q, k, v, scale=c["scale"], softcap=c["softcap"], is_causal=c["is_causal"])


def run_plain(c: Case) -> list[str]:
    q, k, v = values_of(c, c["B"], c["lengths_q"][0], c["lengths_k"][0])
    exact = exact_of(c, q, k, v)
    placed = [place(x, how) for x, how in zip((q, k, v), c["places"], strict=True)]
    as_cupy = "backwards" in c["places"]
    if as_cupy:
        placed = [to_cupy(x) if isinstance(x, torch.Tensor) else x for x in placed]
    found, densities = [], []
    for tau in (0.0, c["tau"]):
        base, view = guarded_out(q, c["out"])
        arrays = [*placed, to_cupy(view) if as_cupy else view]
        if c["layout"] == "BSHD":
            arrays = [x.transpose(0, 2, 1, 3) if as_cupy else x.transpose(1, 2) for x in arrays]
        _, lse, stats = s2o_attention(
            *arrays[:3], out=arrays[3], layout=c["layout"], return_stats=True, **options_of(c, tau)
        )
        synchronize()
        found += [f"tau {tau:g}: {x}" for x in wrong_rows(c, tau, view, to_torch(lse), exact, v)]
        found += [] if guard_is_intact(base, view) else [f"tau {tau:g}: memory around out was written"]
        found += wrong_path(c, stats)
        densities.append(stats.density)
    if q.numel() and k.numel() and abs(densities[0] - 1) > 1e-9:
        found.append(f"the density at tau 0 is {densities[0]}")
    if not -1e-9 <= densities[1] <= densities[0] + 1e-9:
        found.append(f"densities {densities} at tau 0 and {c['tau']:g}")
    found += [f"{name} was written" for name, x, was in zip("qkv", placed, (q, k, v), strict=True)
              if not same(to_torch(x), was.contiguous())]  # fmt: skip
    return found


def wrong_path(c: Case, stats: Any) -> list[str]:
    """A path that may not run, or the portable one where Hopper's could have."""
    if DRY or stats.path is None:
        return []
    rows_fit = c["D"] % 8 == 0 and set(c["places"]) <= set(PLACES[:4]) and c["out"] in OUT_PLACES[:4]
    tiles = c["block_n"] == 128 and (c["block_m"] == 128 or c["D"] <= 128)
    if capability() != 90 or c["path"] == "portable":
        return [] if stats.path == "portable" else [f"{stats.path} kernels ran"]
    positive = c["scale"] is None or c["scale"] > 0
    missed = rows_fit and tiles and positive and stats.path != "hopper"
    return [f"the portable kernels ran, not Hopper's: {stats.path_reason}"] if missed else []


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def watched(count: int) -> list[int]:
    """Sequences that are compared one by one: all, or some on both sides of 128."""
    return list(range(count)) if count <= 8 else [0, 1, 64, 127, 128, count - 1]


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, total, D] as a packed batch has it, [total, heads, D]."""
    return x[0].transpose(0, 1)


def run_packed(c: Case) -> list[str]:
    at_q, at_k = starts(c["lengths_q"]), starts(c["lengths_k"])
    q, k, v = values_of(c, 1, at_q[-1], at_k[-1])
    placed = [packed_rows(place(x, how)) for x, how in zip((q, k, v), c["places"], strict=True)]
    on_device = c["values"] % 3 == 1
    given = [torch.tensor(x, dtype=torch.int32, device=DEVICE) if on_device else x for x in (at_q, at_k)]
    found = []
    for tau in (0.0, c["tau"]):
        base, view = guarded_out(q, c["out"])
        _, lse, stats = s2o_attention_varlen(
            *placed, *given, out=packed_rows(view), return_stats=True, **options_of(c, tau)
        )
        synchronize()
        found += [] if guard_is_intact(base, view) else [f"tau {tau:g}: memory around out was written"]
        found += [] if bool(torch.isfinite(view).all()) else [f"tau {tau:g}: o is not finite everywhere"]
        for i in watched(len(c["lengths_q"])):
            rows_q, rows_k = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
            own = [x[:, :, rows] for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
            got, got_lse = view[:, :, rows_q], lse[None, :, rows_q]
            where = f"tau {tau:g}, sequence {i}: "
            found += [where + x for x in wrong_rows(c, tau, got, got_lse, exact_of(c, *own), own[2])]
            alone, alone_lse, alone_stats = s2o_attention(
                *(x[:, :, rows] for x, rows in zip((y.transpose(0, 1)[None] for y in placed),
                                                   (rows_q, rows_k, rows_k), strict=True)),
                out=guarded_out(own[0], c["out"])[1],  # where rows start decides on the kernel's steps
                return_stats=True, **options_of(c, tau),
            )  # fmt: skip
            alike = alone_stats.path == stats[i].path
            if alike and not (same(alone, got) and same(alone_lse, got_lse)):
                found.append(where + "not the bits of a call of its own")
    return found


def run_paged(c: Case) -> list[str]:
    """Also with ragged queries. Each sequence has the bits of a call of its own on its pages, and of one on arrays."""
    ragged = c["mode"] == "ragged"
    lengths_q, lengths_k, B = c["lengths_q"], c["lengths_k"], len(c["lengths_k"])
    at = starts(lengths_q)
    Sk = max(1, *lengths_k)
    q, _, _ = values_of(c, 1 if ragged else B, at[-1] if ragged else lengths_q[0], 1)
    _, k, v = values_of(c, B, 1, Sk)
    rng = random.Random(c["values"])
    k_pages, v_pages, table = pages_of(k, v, lengths_k, c["page_size"], rng, layout=c["page_layout"], junk=NAN)
    placed = place(q, c["places"][0])
    found = []
    for tau in (0.0, c["tau"]):
        base, view = guarded_out(q, c["out"])
        options = {**options_of(c, tau), "layout": c["page_layout"]}
        given = rng.choice([lengths_k, torch.tensor(lengths_k, device=DEVICE)])
        if ragged:
            _, lse = s2o_attention_paged(
                packed_rows(placed), k_pages, v_pages, table, seqlen_k=given, cu_seqlens_q=at, out=packed_rows(view),
                **options,
            )  # fmt: skip
        else:
            _, lse = s2o_attention_paged(placed, k_pages, v_pages, table, seqlen_k=given, out=view, **options)
        synchronize()
        found += [] if guard_is_intact(base, view) else [f"tau {tau:g}: memory around out was written"]
        for i in watched(B):
            rows = slice(at[i], at[i + 1])
            q_own, got = (x[:, :, rows] if ragged else x[i : i + 1] for x in (placed, view))
            got_lse = lse[None, :, rows] if ragged else lse[i : i + 1]
            own = (q_own, k[i : i + 1, :, : lengths_k[i]], v[i : i + 1, :, : lengths_k[i]])
            where = f"tau {tau:g}, sequence {i}: "
            found += [where + x for x in wrong_rows(c, tau, got, got_lse, exact_of(c, *own), own[2])]
            alone = s2o_attention_paged(
                q_own, k_pages, v_pages, table[i : i + 1], seqlen_k=lengths_k[i], return_stats=True, **options
            )
            if not (same(alone[0], got) and same(alone[1], got_lse)):
                found.append(where + "not the bits of a paged call of its own")
            arrays = s2o_attention(q_own, *(x.contiguous() for x in own[1:]), return_stats=True, **options_of(c, tau))
            alike = arrays[2].path == alone[2].path
            if alike and not (same(arrays[0], alone[0]) and same(arrays[1], alone[1])):
                found.append(where + "not the bits of the same call on arrays")
    return found


RUN = {"plain": run_plain, "packed": run_packed, "paged": run_paged, "ragged": run_paged}


def random_cases(run: Run, mode: str, most: int) -> str:
    done = refused = 0
    for number in run.cases(most):
        case = draw(run.rng(number), mode)
        if run.case is not None:
            print(json.dumps(case, indent=1), flush=True)
        try:
            found = RUN[mode](case)
        except ValueError as error:
            if "blocks; accepted: up to" not in str(error):  # more than one launch may have
                raise AssertionError(f"{error}; {json.dumps(case)}") from error
            found, refused = [], refused + 1
        assert not found, f"{len(found)} wrong: {found[:4]}; {json.dumps(case)}"
        done += 1
    assert done, "there was no time for a single case"
    return f"{done} problems" + (f", {refused} refused" if refused else "")


@check(60, shards=4, dry=True)
def plain(run: Run) -> str:
    """Batched arrays anywhere in memory."""
    return random_cases(run, "plain", of_size(1200, 6))


@check(45, shards=2, dry=True)
def packed(run: Run) -> str:
    """Packed sequences: each with the bits of a call of its own."""
    return random_cases(run, "packed", of_size(250, 3))


@check(45, shards=2, dry=True)
def paged(run: Run) -> str:
    """Pages in random order, NaN wherever no key is: the bits of arrays."""
    return random_cases(run, "paged", of_size(250, 3))


@check(45, shards=2, dry=True)
def ragged(run: Run) -> str:
    """Ragged queries over a paged cache in one call: the bits of the loop."""
    return random_cases(run, "ragged", of_size(250, 3))


@check(20, dry=True)
def candidate_counts(run: Run) -> str:
    """Every count of candidates around pass 2's key tiles and its stop checks."""
    counts = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 321, 384, 385, 448, 449, 513, 769]
    cases = [(D, n, path) for n in counts for D in (256, 128, 160, 64) for path in paths()][:: of_size(1, 20)]
    done = 0
    for number in run.cases(len(cases)):
        D, count, path = cases[number]
        q, k, v = qkv(count, 1, 2, 1, 70, 70 + count, D)
        exact = dense(q, k, v)
        for tau in (0.0, 0.05, 1e30):
            config = S2OConfig(segment=128, tau=tau, path=path, dense_up_to=0, rank="mean")
            o, lse = s2o_attention(q, k, v, config=config, out=torch.full_like(q, NAN), return_lse=True)
            found = wrong_dense(o, lse, exact) if tau == 0 else wrong_sparse(o, lse, exact, v, "mean")
            assert not found, f"head_dim {D}, {count} candidates, {path}, tau {tau:g}: {found}"
        done += 1
    return f"{done} of {len(cases)}"
