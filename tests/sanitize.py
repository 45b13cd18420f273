"""Small cases for compute-sanitizer, which slows a GPU a hundredfold: `make sanitize` runs this under it.

CuPy's memory pool is switched off, so that each array is an allocation of its own and an access past its end shows.
Results are compared as well. Exit status 1 if one differs. `sanitize.py 0/3` runs the first of every three cases, so
that processes can share them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import nsa_cases
import numpy as np
import ragged_pages
import test_gpu_methods
import test_gpu_nsa
from conftest import Device, has_gpu, has_hopper
from gpu_cases import DTYPES, SANITIZED, Case, run_diff
from listed_calls import unlike_s2o, wrong_by_random_lists
from method_stages import selected
from method_stages import wrong_stages as wrong_of_method
from packs import bits, differing_on
from pages import differing, fits_pages

from s2o_cupy import S2OConfig, s2o_attention_paged
from s2o_cupy.caches import clear_cache
from s2o_cupy.methods import (
    FlexPrefillConfig,
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    VerticalSlashConfig,
    XAttentionConfig,
)
from s2o_cupy.nsa import NSAConfig
from s2o_cupy.plan import collecting
from s2o_cupy.plan import launch_plan as plan
from s2o_cupy.reference.fp8 import from_e4m3

# Ragged queries: lengths of queries and of keys. One query, none, whole tiles, and one that is not dense.
RAGGED = [130, 0, 1, 64, 300], [130, 9, 70, 65, 350]
PAGED = ((64, 1, "NHD"), (128, 16, "HND"), (256, 64, "NHD"))  # head_dim, page size, layout
# Lists: a case, keys of a unit, page size.
LISTED = (
    (Case(seqlen_q=150, seqlen_k=333, head_dim=128, is_causal=False), 1, None),
    (Case(seqlen_q=130, seqlen_k=290, head_dim=80, is_causal=False, batch=2, dtype="float16"), 64, None),
    (Case(seqlen_q=130, seqlen_k=290, head_dim=256, is_causal=False), 128, None),
    (Case(seqlen_q=130, seqlen_k=290, head_dim=64, is_causal=False), 1, 16),
    (Case(seqlen_q=130, seqlen_k=290, head_dim=128, is_causal=False), 64, 16),
    (Case(seqlen_q=130, seqlen_k=290, head_dim=256, is_causal=False, heads=1), 64, 1),
    (Case(seqlen_q=150, seqlen_k=333, head_dim=128, is_causal=False, block_m=64, heads=1), 1, 16),
    (Case(seqlen_q=150, seqlen_k=333, head_dim=128, is_causal=False, block_m=64), 1, 16),  # two heads of a KV head
    (Case(seqlen_q=300, seqlen_k=200, head_dim=64, is_causal=False, block_m=64, heads=4, kv_heads=2), 64, None),
)
# Selections: head_dim 128 by Hopper's kernels where there are such, 256 by the others.
METHODS = (
    (MeanPoolingConfig(threshold=0.7), 80),
    (PBSConfig(share="kv_head"), 128),
    (PBSConfig(scores="antidiagonal", stride=8, share="kv_head", threshold=0.7), 256),
    (SpargeConfig(tau=0.7, theta=0.32), 128),
    (SpargeConfig(topk=0.2, theta=0.32), 256),
    (XAttentionConfig(), 128),
    (XAttentionConfig(stride=16, path="portable"), 64),
    (FlexPrefillConfig(gamma=0.6, tau=0.9, min_blocks=2), 128),
    (VerticalSlashConfig(verticals=100, slashes=60), 128),
    (VerticalSlashConfig(verticals=40, slashes=100, block_m=64), 256),
)

Check = tuple[str, str, Callable[[], list[str]]]  # path, name, what is wrong


def wrong_stages(case: Case, path: str) -> list[str]:
    report = run_diff(case, path)
    return [] if report.ok else [report.table()]


def ragged_differing(device: Device, head_dim: int, page_size: int, layout: str) -> list[str]:
    rng = np.random.default_rng(0)
    lengths_q, lengths_k = RAGGED
    shapes = [(sum(lengths_q), 2, head_dim), *[(sum(lengths_k), 1, head_dim)] * 2]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    return ragged_pages.differing(device, rng, arrays, lengths_q, lengths_k, page_size, layout)


def fp8_differing(device: Device) -> list[str]:
    """Random bytes in pages, NaN in some columns of values, with a scale for each KV head: as with what they stand for
    in 16-bit pages."""
    import cupy

    rng = np.random.default_rng(0)
    lengths_q, lengths_k = RAGGED
    codes = rng.integers(0, 256, (2, sum(lengths_k), 2, 72)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    codes[1, ..., :7] |= 127
    q = cupy.asarray(rng.standard_normal((sum(lengths_q), 4, 72)).astype(device.dtype))
    eights, wide, scales = [], [], [np.array(x, np.float32) for x in ([0.02, 0.01], [0.5, 0.3])]
    table, put = ragged_pages.in_pages(rng, codes[0].view(ml_dtypes.float8_e4m3fn), lengths_k, 16, "NHD")
    for x, scale in zip(codes, scales, strict=True):
        pages_of_8 = put(x.view(ml_dtypes.float8_e4m3fn)).view(np.uint8)
        eights.append(cupy.asarray(pages_of_8))
        of_heads = from_e4m3(pages_of_8.swapaxes(1, 2), scale, device.dtype)
        wide.append(cupy.asarray(np.ascontiguousarray(of_heads.swapaxes(1, 2))))
    options: dict[str, Any] = {"seqlen_k": lengths_k, "cu_seqlens_q": [0, *itertools.accumulate(lengths_q)]}
    options |= {"config": device.config, "return_lse": True}
    table, k_scale, v_scale = map(cupy.asarray, (table, *scales))
    found = s2o_attention_paged(q, eights[0], eights[1], table, k_scale=k_scale, v_scale=v_scale, **options)
    expected = s2o_attention_paged(q, wide[0], wide[1], table, **options)
    pairs = zip(("o", "lse"), found, expected, strict=True)
    return [name for name, x, y in pairs if not np.array_equal(bits(x), bits(y))]


def ragged_on(path: str, dense_up_to: int = 200) -> Device:
    config = S2OConfig(segment=128, tau=0.05, path=path, dense_up_to=dense_up_to)
    return Device("cuda", DTYPES["bfloat16"], config)


def checks_of_lists(path: str) -> Iterator[Check]:
    for case, unit, page_size in LISTED:
        name = f"lists of units of {unit}, pages of {page_size}, {case}"
        yield path, name, partial(wrong_by_random_lists, case, path, unit, page_size)
        yield path, f"values left out, {name}", partial(wrong_by_random_lists, case, path, unit, page_size, -1.0)
    for segment in (128, 256):  # without an order of queries, and with one
        case = Case(seqlen_q=400, segment=segment, head_dim=128, options={"tail": "none"})  # which lists have none of
        yield path, f"S2O by lists of its own, {case}", partial(unlike_s2o, case, path)


def wrong_selection(config: Any, head_dim: int) -> list[str]:
    q, k, _ = test_gpu_methods.draw(np.random.default_rng(0), "float16", 300, 430, heads=2, kv_heads=1,
                                    head_dim=head_dim)  # fmt: skip
    return wrong_of_method(selected(q, k, config), q, k, config)


def wrong_nsa(path: str, head_dim: int, heads: int) -> list[str]:
    config = replace(nsa_cases.SMALL, path=path)
    x = nsa_cases.draw(np.random.default_rng(0), DTYPES["bfloat16"], 333, heads=heads, kv_heads=2, head_dim=head_dim,
                       config=config)  # fmt: skip
    o, blocks = test_gpu_nsa.attend(x, config)
    return nsa_cases.choice_problems(blocks, x, config) + nsa_cases.whole_problems(o, x, blocks, config)


def wrong_window(sinks: int) -> list[str]:
    x = nsa_cases.draw(np.random.default_rng(0), DTYPES["float16"], 300, 777, head_dim=128)
    return test_gpu_nsa.window_problems(x, 200, sinks)


def wrong_beside_infinite(heads: int) -> list[str]:
    """Values that are not finite are taken out of products, and rows before them keep their bits."""
    x = nsa_cases.draw(np.random.default_rng(0), DTYPES["float16"], 700, heads=heads, kv_heads=2, head_dim=128)
    before = test_gpu_nsa.attend(x, nsa_cases.SMALL)[0][:, :, :400]
    x.v_cmp[:, :, 30, 7] = x.v[:, :, 500, 9] = np.inf
    after = test_gpu_nsa.attend(x, nsa_cases.SMALL)[0][:, :, :400]
    return [] if before.tobytes() == after.tobytes() else ["rows that see no value that is not finite"]


def wrong_long_choice(group: int, length: int) -> list[str]:
    """NSA's choice among so many blocks that a lane of a warp has several pieces of them."""
    x = nsa_cases.draw(np.random.default_rng(0), DTYPES["bfloat16"], 40, length, heads=group, kv_heads=1)
    return nsa_cases.choice_problems(test_gpu_nsa.attend(x, NSAConfig())[1], x, NSAConfig())


def checks() -> Iterator[Check]:
    paths = ("portable", "hopper") if has_hopper() else ("portable",)
    for case, path in itertools.product(SANITIZED, paths):
        if path == "hopper" and not case.hopper:
            continue
        yield path, str(case), partial(wrong_stages, case, path)
        if fits_pages(case):
            yield path, "in pages", partial(differing, case, path)
    for path, is_causal, head_dim in itertools.product(paths, (True, False), (64, 256)):
        name = f"packed, is_causal={is_causal}, head_dim={head_dim}"
        yield path, name, partial(differing_on, path, is_causal, head_dim)
    for path, paged in itertools.product(paths, PAGED):
        yield path, f"ragged queries over pages {paged}", partial(ragged_differing, ragged_on(path), *paged)
    for path in paths:
        yield path, "ragged queries over pages of 8 bits", partial(fp8_differing, ragged_on(path))
        yield from checks_of_lists(path)
    for config, head_dim in METHODS:
        yield "", f"selection, head_dim={head_dim}, {config}", partial(wrong_selection, config, head_dim)
    for path, head_dim, heads in itertools.product(paths, (80, 128), (2, 4)):
        yield path, f"NSA, head_dim={head_dim}, {heads} heads", partial(wrong_nsa, path, head_dim, heads)
    for group, length in ((1, 30_000), (2, 60_000), (8, 20_000)):
        yield "", f"NSA, {length} keys of {group} heads", partial(wrong_long_choice, group, length)
    for sinks in (0, 130):
        yield "", f"NSA's window, {sinks} sinks", partial(wrong_window, sinks)
    for heads in (2, 4):
        yield "", f"NSA, values that are not finite, {heads} heads", partial(wrong_beside_infinite, heads)
    dense = Case(seqlen_q=200, seqlen_k=333, head_dim=72, batch=2, options={"dense_up_to": 1000})
    for path in paths:
        yield path, "dense, in small pages", partial(differing, dense, path, page_size=8)
        if path == "portable":
            continue

        # Few, but more than the one query that packed launches plan for.
        plan.COLLECT_ROWS = collecting.COLLECT_ROWS = 100
        collecting.COLLECT_PAIRS = 0
        clear_cache()
        yield path, "dense, in pages that are collected", partial(differing, dense, path, page_size=8)
        name = "ragged queries over pages that are collected"
        yield path, name, partial(ragged_differing, ragged_on(path, 1000), 128, 8, "NHD")


def main(part: str = "0/1") -> int:
    first, parts = map(int, part.split("/"))
    if not has_gpu():
        print("no GPU: cupy.is_available() is False", file=sys.stderr)
        return 2
    import cupy

    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    failed = 0
    for path, name, check in itertools.islice(checks(), first, None, parts):
        start = time.perf_counter()
        wrong = check()
        print(f"{path:8} {time.perf_counter() - start:6.1f} s  {name}", flush=True)
        if wrong:
            print("wrong, or other bits than in one array or a call of its own:", *wrong, sep="\n", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
