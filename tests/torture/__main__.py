"""Hostile checks of one GPU, each in a process of its own.

    make torture                                     all, about 4 minutes on 16 cores
    make torture SEED=1                              with other random numbers
    make torture TORTURE="--only streams,memory.out" checks whose names contain one of these
    make torture TORTURE="--only random_problems.paged --case 17"   one case, in this process
    make torture TORTURE=--list                      their names

Exit status: 0 if all ran and passed or said why they cannot run here, 1 if not, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path

from . import board, harness

START_UP = 7.0  # seconds that a process takes for imports and for CUDA's first use
SLOWEST_PACE = 0.2  # of the seconds that a check asks for: less would leave out most of it


# Of the processes that are started: libraries that would take all memory, ask the network or start many processes.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    "OMP_NUM_THREADS": "2",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="checks whose names contain one of these")
    parser.add_argument("--case", type=int, help="this case of the one check that --only names, in this process")
    parser.add_argument("--minutes", type=float, default=4.0, help="for all checks together (default: 4)")
    parser.add_argument("--lanes", type=int, default=0, help="checks at a time (default: half of the cores, at most 8)")
    parser.add_argument("--json", type=Path, default=Path("build/torture.json"), help="where the results go")
    parser.add_argument("--list", action="store_true", help="print the names of all checks")
    parser.add_argument("--dry", action="store_true", help="on the CPU, small, what makes sense there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def missing(dry: bool) -> str:
    """Why nothing can be run here, or nothing."""
    try:
        import torch
    except ImportError:
        return "PyTorch is missing: make torture INTEROP=1"
    if dry:
        return ""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU: a build of PyTorch with CUDA is needed (or try --dry)"
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except Exception as error:
        return f"CuPy does not work here: {error}"
    return ""


def pace_of(chosen: list[harness.Check], minutes: float, lanes: int) -> float:
    """By how much the checks' loops are longer or shorter, for all to take so many minutes."""
    beside = sum(check.shards * (check.seconds + START_UP) for check in chosen if not check.alone)
    alone = sum(check.seconds + START_UP for check in chosen if check.alone)
    return max(SLOWEST_PACE, 60 * minutes / (beside / lanes + alone))


def jobs(chosen: list[harness.Check], seed: int, pace: float) -> list[board.Job]:
    """The longest first; what must be alone comes last."""
    made = []
    for check in sorted(chosen, key=lambda check: (check.alone, -check.seconds)):
        for shard in range(check.shards):
            name = check.name + (f" {shard + 1}/{check.shards}" if check.shards > 1 else "")
            command = board.command(check.name, "--seed", seed, "--shard", shard, "--pace", pace)
            made.append(board.Job(name, command, check.limit * max(1.0, pace), check.alone))
    return made


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    if asked.dry:
        os.environ[harness.DRY] = "1"
    if asked.worker:
        harness.work(asked.worker, asked.seed, shard=asked.shard, pace=asked.pace)
        return 0
    if reason := missing(harness.is_dry()):
        print(f"torture: {reason}", file=sys.stderr)
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    words = [word.strip() for word in asked.only.split(",") if word.strip()]
    chosen = [
        check
        for name, check in harness.load_checks().items()
        if (not words or any(word in name for word in words)) and (check.dry or not harness.is_dry())
    ]
    if not chosen:
        print(f"torture: --only is {asked.only!r}; accepted: parts of names that --list prints", file=sys.stderr)
        return 2
    if asked.list:
        print(*(f"{check.name:45} {check.run.__doc__ or ''}".split("\n")[0].rstrip() for check in chosen), sep="\n")
        return 0
    if asked.case is not None:
        if len(chosen) != 1:
            print(f"torture: --case is given, and --only names {len(chosen)} checks; accepted: one", file=sys.stderr)
            return 2
        return 0 if harness.work(chosen[0].name, asked.seed, case=asked.case)["status"] in board.CLEAN else 1
    return run(asked, chosen)


def run(asked: argparse.Namespace, chosen: list[harness.Check]) -> int:
    began = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    lanes = asked.lanes or max(1, min(8, cores // 2))
    from .arrays import about

    described = {"seed": asked.seed, "minutes": asked.minutes, "lanes": lanes, **about()}
    print(*(f"{name}: {value}" for name, value in described.items()), sep=", ", flush=True)
    todo = jobs(chosen, asked.seed, pace_of(chosen, asked.minutes, lanes))
    scores = board.Board(asked.json, described, len(todo), lambda line: print(line, flush=True))
    end = began + 90 * asked.minutes  # half as long again: some checks have a fixed length
    first = [job for job in todo if job.name.startswith("kernels.")]  # what all others would compile at once
    board.run_all(scores, first, cores, end)
    board.run_all(scores, [job for job in todo if job not in first], lanes, end)
    seconds = time.monotonic() - began
    print(*(f"{n} {status}" for status, n in scores.counts().items()), f"in {seconds:.0f} s -> {asked.json}", sep=", ")
    for row in scores.rows:
        if row.status not in board.CLEAN:
            print(row.line())
    return scores.exit_status()


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
