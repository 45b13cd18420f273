"""Starts each check in a process of its own, several at a time, and keeps the score."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAIL = 40  # lines of a process's own output that are kept
START = 180.0  # seconds for imports and for CUDA's first use on a busy machine
EXIT = 60.0  # seconds that a process may take to end once its check did
CLEAN = ("PASS", "SKIP")


@dataclass(frozen=True)
class Job:
    """One process: a check, or a shard of it."""

    name: str
    command: Sequence[str]
    limit: float = 60.0  # seconds from its beginning to its end
    alone: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Row:
    """What came of a job: PASS, SKIP, FAIL, or LATE if there was no time for it."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)  # of a process that failed, faulthandler's lines too

    def line(self) -> str:
        return f"{self.status:4} {self.name:45} {self.seconds:6.1f} s  {' '.join(self.detail.split())[:600]}"


def run_job(job: Job, end: float) -> Row:
    """Run one process to its end. One that hangs past its limit, or past ``end``, is killed with all that it started;
    one that dies, by a signal too, is its own failure only."""
    began = time.monotonic()
    process = subprocess.Popen(
        job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env=os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    output: list[str] = []
    at: Any = None
    ended: dict[str, Any] | None = None
    deadline = began + START
    reason = "did not begin"
    while ended is None:
        try:
            line = lines.get(timeout=max(0.01, min(deadline, end) - time.monotonic()))
        except queue.Empty:
            reason = "hangs: " + reason
            break
        if line is None:
            reason = f"died ({_exit_status(process.wait())}): {reason}"
            break
        record = _record(line)
        if record is None:
            output = [*output, line.rstrip()][-TAIL:]
        elif "begin" in record:
            deadline, reason = time.monotonic() + job.limit, "no case was announced"
        elif "at" in record:
            at = record["at"]
            reason = f"at case {at}"
        elif "end" in record:
            ended = record
    if ended is not None and ended["status"] in CLEAN:
        ended = _after_its_end(process, ended)
    _kill(process)
    seconds = round(time.monotonic() - began, 1)
    if ended is None:
        return Row(job.name, "FAIL", reason, seconds, output)
    again = f" (last case {at})" if ended["status"] == "FAIL" and at is not None else ""
    row = Row(job.name, ended["status"], ended["detail"] + again, seconds)
    if row.status == "FAIL":
        row.output = output
    return row


def _after_its_end(process: subprocess.Popen[str], ended: dict[str, Any]) -> dict[str, Any]:
    """``ended``, or a failure if the process cannot end: what is freed last may still crash or hang."""
    try:
        code = process.wait(timeout=EXIT)
    except subprocess.TimeoutExpired:
        return ended | {"status": "FAIL", "detail": f"passed, and then its process does not end: {ended['detail']}"}
    if code == 0:
        return ended
    return ended | {"status": "FAIL", "detail": f"passed, and then died ({_exit_status(code)}): {ended['detail']}"}


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _record(line: str) -> dict[str, Any] | None:
    if line.startswith("@{"):
        with contextlib.suppress(ValueError):
            return json.loads(line[1:])
    return None


def _exit_status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _kill(process: subprocess.Popen[str]) -> None:
    """With the session that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Board:
    """Rows as they come, on the terminal and in a JSON file that is rewritten after each."""

    def __init__(self, path: Path, about: dict[str, Any], total: int, show: Callable[[str], None] = print) -> None:
        self.path, self.about, self.total, self.show = path, about, total, show
        self.rows: list[Row] = []
        self.running: dict[str, float] = {}
        self.lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)  # an error before the work rather than after it
        self._write()

    def add(self, row: Row) -> None:
        with self.lock:
            self.rows.append(row)
            self.show(row.line())
            for line in row.output:
                self.show(f"     | {line}")
            self._write()

    def progress(self) -> str:
        with self.lock:
            now = time.monotonic()
            running = ", ".join(f"{name} ({now - since:.0f} s)" for name, since in self.running.items())
            return f"... {len(self.rows)} of {self.total} done; running: {running or 'nothing'}"

    def counts(self) -> dict[str, int]:
        return {status: sum(row.status == status for row in self.rows) for status in ("PASS", "SKIP", "FAIL", "LATE")}

    def exit_status(self) -> int:
        """0 if all checks ran and passed, or said why they cannot here; 1 if not."""
        return 0 if len(self.rows) == self.total and all(row.status in CLEAN for row in self.rows) else 1

    def _write(self) -> None:
        rows = [vars(row) for row in self.rows]
        text = json.dumps({**self.about, "counts": self.counts(), "checks": rows}, indent=1, default=str)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)


def run_all(board: Board, jobs: Sequence[Job], lanes: int, end: float, every: float = 15.0) -> None:
    """Jobs that bear company in ``lanes`` at a time, then the others one by one; none begins after ``end``."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(every):
            board.show(board.progress())

    threading.Thread(target=report, daemon=True).start()
    try:
        for alone, at_once in ((False, lanes), (True, 1)):
            waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
            for job in jobs:
                if job.alone == alone:
                    waiting.put(job)
            threads = [threading.Thread(target=_lane, args=(board, waiting, end)) for _ in range(at_once)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        done.set()


def _lane(board: Board, waiting: queue.SimpleQueue[Job], end: float) -> None:
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        if time.monotonic() > end:
            board.add(Row(job.name, "LATE", "no time was left; --minutes gives more"))
            continue
        with board.lock:
            board.running[job.name] = time.monotonic()
        row = run_job(job, end + job.limit)
        with board.lock:
            del board.running[job.name]
        board.add(row)


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-u", "-m", "torture", "--worker", name, *map(str, arguments)]
