"""What a check is, and how it runs in a process of its own.

A check is a function of a `Run`, which knows its seed and its time. It returns a line that says what it did, raises
AssertionError where something is wrong, and Skip where the machine has not what it needs.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MODULES = ("kernels", "random_problems", "values", "streams", "replays", "graphs", "processes", "models", "memory")
DRY = "TORTURE_DRY"  # set to 1 in the environment: small, on the CPU, through the NumPy reference


def is_dry() -> bool:
    return os.environ.get(DRY) == "1"


class Skip(Exception):
    """The machine has not what a check needs."""


@dataclass(frozen=True)
class Check:
    name: str  # module.function
    run: Callable[[Run], str]
    seconds: float  # for its loops
    shards: int  # processes among which its cases are dealt
    alone: bool  # it measures memory, or takes all of it
    dry: bool  # it also runs without a GPU

    @property
    def limit(self) -> float:
        """Seconds after which it hangs: kernels may have to be compiled, and the machine may be busy."""
        return 3 * self.seconds + 90


CHECKS: dict[str, Check] = {}


def check(seconds: float, *, shards: int = 1, alone: bool = False, dry: bool = False) -> Callable[[Any], Any]:
    """Register a function as a check."""

    def register(function: Callable[[Run], str]) -> Callable[[Run], str]:
        name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
        CHECKS[name] = Check(name, function, seconds, shards, alone, dry)
        return function

    return register


def load_checks() -> dict[str, Check]:
    """By name. Needs PyTorch."""
    for module in MODULES:
        importlib.import_module(f"torture.{module}")
    importlib.import_module("torture.arrays").set_up()
    return CHECKS


class Run:
    """What a check is told, and how it says that it lives."""

    def __init__(self, check: Check, seed: int, *, shard: int = 0, case: int | None = None, pace: float = 1.0) -> None:
        self.check, self.seed, self.shard, self.case = check, seed, shard, case
        self.end = time.monotonic() + check.seconds * pace

    def rng(self, *key: object) -> random.Random:
        """Numbers that depend on the seed, the check and ``key`` alone."""
        return random.Random(f"{self.seed} {self.check.name} {key}")

    def late(self) -> bool:
        """Whether loops should come to an end."""
        return time.monotonic() > self.end

    def cases(self, most: int) -> Iterator[int]:
        """Numbers of cases, each announced: one or, while there is time, all of this shard's, or the one asked for."""
        asked = [self.case] if self.case is not None else range(self.shard, most, self.check.shards)
        for done, number in enumerate(asked):
            if done and self.late():
                return
            say(at=number)
            yield number


_lock = threading.Lock()


def say(**record: object) -> None:
    """A line to the process that started this one."""
    with _lock:
        sys.stdout.write("@" + json.dumps(record, default=str) + "\n")
        sys.stdout.flush()


def work(name: str, seed: int, *, shard: int = 0, case: int | None = None, pace: float = 1.0) -> dict[str, Any]:
    """Run one check in this process; what came of it, which is also said."""
    found = load_checks()[name]
    say(begin=name)
    start = time.monotonic()
    try:
        status, detail = "PASS", found.run(Run(found, seed, shard=shard, case=case, pace=pace)) or ""
    except Skip as reason:
        status, detail = "SKIP", str(reason)
    except BaseException as error:
        traceback.print_exc()
        status, detail = "FAIL", f"{type(error).__name__}: {error}"[:2000]
    ended = {"end": name, "status": status, "detail": detail, "seconds": round(time.monotonic() - start, 1)}
    say(**ended)
    return ended
