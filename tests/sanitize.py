"""Small cases for compute-sanitizer, which slows a GPU a hundredfold: `make sanitize` runs this under it.

CuPy's memory pool is switched off, so that each array is an allocation of its own and an access past its end shows.
Results are compared as well. Exit status 1 if one differs.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from conftest import has_gpu, has_hopper
from gpu_cases import SANITIZED, Case, run_diff
from packs import differing_on
from pages import differing, fits_pages

from s2o_cupy.caches import clear_cache
from s2o_cupy.plan import launch_plan as plan

Check = tuple[str, str, Callable[[], list[str]]]  # path, name, what is wrong


def wrong_stages(case: Case, path: str) -> list[str]:
    report = run_diff(case, path)
    return [] if report.ok else [report.table()]


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
    dense = Case(seqlen_q=200, seqlen_k=333, head_dim=72, batch=2, options={"dense_up_to": 1000})
    for path in paths:
        yield path, "dense, in small pages", partial(differing, dense, path, page_size=16)
        if path == "portable":
            continue

        plan.COLLECT_ROWS = 0  # however few its queries are
        clear_cache()
        yield path, "dense, in pages that are collected", partial(differing, dense, path, page_size=16)


def main() -> int:
    if not has_gpu():
        print("no GPU: cupy.is_available() is False", file=sys.stderr)
        return 2
    import cupy

    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    failed = 0
    for path, name, check in checks():
        start = time.perf_counter()
        wrong = check()
        print(f"{path:8} {time.perf_counter() - start:6.1f} s  {name}", flush=True)
        if wrong:
            print("wrong, or other bits than in one array or a call of its own:", *wrong, sep="\n", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
