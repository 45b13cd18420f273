"""Progress of long work on standard error: tqdm where it is installed, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Report", "progress"]

Report = Callable[..., None]  # (done, total[, what])


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """A function ``report(done, total)`` for the ``progress=`` of long calls.

    Nothing is written before the first report. A terminal gets a bar or a line rewritten in place; a
    log gets one line every ten seconds. Each says how long the rest would take at the speed so far.
    """
    bar = _tqdm(title) or _Line(title)
    try:
        yield bar.report
    finally:
        bar.close()


def _tqdm(title: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return _Tqdm(tqdm, title) if sys.stderr.isatty() else None


class _Tqdm:
    def __init__(self, tqdm: Any, title: str) -> None:
        self.make = lambda total: tqdm(desc=title, total=total, file=sys.stderr, leave=False)
        self.bar: Any = None

    def report(self, done: int, total: int, what: Any = None) -> None:
        self.bar = self.bar or self.make(total)
        if what is not None:
            self.bar.set_postfix_str(str(what), refresh=False)
        self.bar.n, self.bar.total = done, total
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Line:
    def __init__(self, title: str) -> None:
        self.title, self.in_place = title, sys.stderr.isatty()
        self.begin = self.last = time.monotonic()
        self.open = False

    def report(self, done: int, total: int, what: Any = None) -> None:
        now = time.monotonic()
        if now - self.last < (0.2 if self.in_place else 10.0):
            return
        self.last, self.open = now, self.in_place
        left = f", {_told((now - self.begin) / done * (total - done))} left" if 0 < done < total else ""
        line = f"{self.title}: {done}/{total}{left}" + (f", {what}" if what is not None else "")
        print(
            f"\r{line:<78}" if self.in_place else line,
            end="" if self.in_place else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self.open:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def _told(seconds: float) -> str:
    """A time as a person says it."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
