"""Compare the kernels with the reference on small problems: python -m tests.emulator --help."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of a small product only wait for each other
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from s2o_cupy._source_tree import SourceTreeFinder  # noqa: E402

from . import device, fake_cupy  # noqa: E402

sys.meta_path.insert(0, SourceTreeFinder)  # this tree's kernels, whatever is installed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator", description=__doc__)
    parser.add_argument("--capability", type=int, default=80, choices=(80, 90), help="compute capability times ten")
    parser.add_argument("--path", choices=("portable", "hopper"), help="that of the capability unless said")
    parser.add_argument("-k", default="", help="cases whose name has this, or one of several (;), or all (+)")
    parser.add_argument("--sanitized", action="store_true", help="gpu_cases.SANITIZED instead of CASES")
    parser.add_argument("--every", type=int, default=1, help="of the cases only each so-many-th")
    parser.add_argument("--first", type=int, default=0, help="with --every: the first one's place")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which warps run")
    parser.add_argument("--seeds", type=int, default=1, help="run each case with so many seeds; outputs must be equal")
    parser.add_argument("--early", action="store_true", help="asynchronous copies land at once")
    parser.add_argument("--together", action="store_true", help="arrays lie as on a GPU, some in the place of others")
    parser.add_argument("--trace", action="store_true", help="print each launch")
    parser.add_argument("--most", type=float, default=1e12, help="leave out cases of more queries x keys x heads")
    options = parser.parse_args()
    device.settings.capability = options.capability
    device.settings.trace, device.settings.late = options.trace, not options.early
    device.settings.apart = not options.together
    fake_cupy.install()

    import gpu_cases
    import numpy as np

    cases = gpu_cases.CASES
    if options.sanitized:
        cases = {repr(case): case for case in gpu_cases.SANITIZED}
    path = options.path or ("hopper" if options.capability == 90 else "portable")
    wanted = [x.split("+") for x in options.k.split(";")]
    cases = {
        name: case for name, case in cases.items()
        if any(all(y in name for y in x) for x in wanted) and (path == "portable" or case.hopper)
    }  # fmt: skip
    cases = dict(list(cases.items())[options.first :: options.every])
    sizes = {name: case.problem() for name, case in cases.items()}
    cases = {
        name: case for name, case in cases.items()
        if (x := sizes[name]).seqlen_q * x.seqlen_k * x.heads * x.batch <= options.most
    }  # fmt: skip
    outputs: list[bytes] = []
    capture = gpu_cases.capture

    def captured(*args: Any) -> Any:
        stages = capture(*args)
        outputs.append(b"".join(np.ascontiguousarray(x).tobytes() for x in (stages.o, stages.lse, stages.visited)))
        return stages

    gpu_cases.capture = captured  # type: ignore[assignment]
    bad = 0
    for number, (name, case) in enumerate(cases.items(), 1):
        start = time.perf_counter()
        outputs.clear()
        said = "ok"
        try:
            for seed in range(options.seed, options.seed + options.seeds):
                device.settings.seed = seed
                report = gpu_cases.run_diff(case, path)
                if not report.ok:
                    said = "DIFFERS\n" + report.table()
            if len(set(outputs)) > 1:
                said = "NOT THE SAME with every seed"
        except Exception as error:
            said = f"FAILED {type(error).__name__}: {error}"
            if not isinstance(error, device.EmulatorError):
                said += "\n" + traceback.format_exc()
        bad += said != "ok"
        print(f"[{number}/{len(cases)}] {time.perf_counter() - start:6.1f} s  {name}: {said}", flush=True)
    print(f"{len(cases) - bad} of {len(cases)} agree")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
