"""Small cases for compute-sanitizer, which slows a GPU a hundredfold: `make sanitize` runs this under it.

CuPy's memory pool is switched off, so that each array is an allocation of its own and an access past its end shows.
Results are compared as well. Exit status 1 if one differs.
"""

from __future__ import annotations

import sys
import time

from conftest import has_gpu, has_hopper
from gpu_cases import SANITIZED, run_diff
from packs import differing_on
from pages import differing, fits_pages


def main() -> int:
    if not has_gpu():
        print("no GPU: cupy.is_available() is False", file=sys.stderr)
        return 2
    import cupy

    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    paths = ("portable", "hopper") if has_hopper() else ("portable",)
    failed = 0
    for case in SANITIZED:
        for path in paths:
            if path == "hopper" and not case.hopper:
                continue
            start = time.perf_counter()
            report = run_diff(case, path)
            print(f"{path:8} {time.perf_counter() - start:6.1f} s  {case}", flush=True)
            if not report.ok:
                print(report.table(), flush=True)
                failed += 1
            if fits_pages(case):
                start = time.perf_counter()
                names = differing(case, path)
                print(f"{path:8} {time.perf_counter() - start:6.1f} s  in pages", flush=True)
                if names:
                    print(f"other bits than in one array: {', '.join(names)}", flush=True)
                    failed += 1
    for path in paths:
        for is_causal in (True, False):
            start = time.perf_counter()
            names = differing_on(path, is_causal)
            print(f"{path:8} {time.perf_counter() - start:6.1f} s  packed, is_causal={is_causal}", flush=True)
            if names:
                print(f"other bits than in a call of its own: {', '.join(names)}", flush=True)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
