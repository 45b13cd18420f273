"""Make every measured figure of README.md and docs: train the models that it needs, measure, and draw anew.

    python benchmarks/figures.py --list                     every figure, the minutes it takes, and who shows it
    python benchmarks/figures.py --check                    which figures are older than what they time, and why
    python benchmarks/figures.py                            make all of them, on one GPU
    python benchmarks/figures.py --only retrieval,speed_query
    python benchmarks/figures.py --stale                    only those that --check names
    python benchmarks/figures.py --side-by-side             a figure on each GPU, with logs in build/figures
    python benchmarks/figures.py --dry-run                  the plan of such a call; needs no GPU

`make figures` runs this in an environment of its own. What is made and how is in `_published.py`. A model that is in
build/figures is not trained again, unless by --train. A figure replaces the one in benchmarks/results once its command
has ended well; after a failure the others are made all the same, and the end says what failed. Then docs/figures.py
writes the tables and draws the pictures. --check ends with 1 if a figure is stale, and with 0 if none is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import _published
from _published import FIGURES, NOTEBOOK, ROOT, TRAINED

MADE = ROOT / "build" / "figures"
NO_GPU = (
    "figures: no usable GPU: an NVIDIA GPU, PyTorch with CUDA and CuPy are needed to measure; without one "
    "--list, --check and --dry-run work"
)


class Step(NamedTuple):
    """``name`` of a model or a figure, and the command that makes it."""

    name: str
    command: list[str]
    minutes: float
    gpus: int = 1
    package: str = ""  # that must be there
    folder: str = ""  # likewise

    def lacks(self, gpus: int) -> str:
        """Of a machine with so many GPUs, in words; nothing if it can run."""
        if self.gpus > gpus:
            return f"needs {self.gpus} GPUs, and there are {gpus}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs {self.package}, which is not installed"
        if self.folder and not (ROOT / self.folder).is_dir():
            return f"needs {self.folder}, which is not there"
        return ""


def steps(names: Sequence[str], train: bool = False) -> list[Step]:
    """Figures in the list's order, each after the models that it needs and that are not there."""
    found: dict[str, Step] = {}
    for name in (name for name in FIGURES if name in names):
        figure = FIGURES[name]
        for model in figure.needs:
            if train or not (ROOT / TRAINED[model].file).exists():
                found.setdefault(model, Step(model, shlex.split(TRAINED[model].command), TRAINED[model].minutes))
        into = ["--json", (MADE / f"{name}.json").relative_to(ROOT).as_posix()]
        found[name] = Step(
            name, shlex.split(figure.command) + into, figure.minutes, figure.gpus, figure.package, figure.folder
        )
    return [*found.values()]


def readers(name: str) -> list[str]:
    """Pages that show a figure or point to its file, and pictures that are drawn from it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = re.compile(rf"<!-- figures:{name}[ >]|results/{name}\.json")
    found = [page for page in pages if page.exists() and shown.search(page.read_text(encoding="utf-8"))]
    source = (ROOT / "docs" / "pictures.py").read_text(encoding="utf-8").partition("\nPICTURES = {")[2]
    drawn = [line.split('"')[1] for line in source.splitlines() if f'"{name}"' in line and "Picture(" in line]
    return [*(page.relative_to(ROOT).as_posix() for page in found), *(f"docs/{picture}.png" for picture in drawn)]


# ---------------------------------------------------------------- what it says


def plan(made: Sequence[Step], gpus: int | None = None) -> str:
    """Steps, with the minutes that each takes; of those that cannot run here, that they are left out."""
    lines = []
    for step in made:
        wanted = [f"{step.gpus} GPUs"] * (step.gpus > 1) + [x for x in (step.package, step.folder) if x]
        note = f", needs {' and '.join(wanted)}" if wanted else ""
        note += ": left out" if gpus is not None and step.lacks(gpus) else ""
        lines.append(f"{step.minutes:4g} min  {step.name}{note}\n          python {shlex.join(step.command)}")
    total = sum(step.minutes for step in made)
    return "\n".join([*lines, f"{total:4g} min in all on one H200, about, for {len(made)} steps"])


def listed() -> str:
    lines = []
    for name, figure in FIGURES.items():
        needs = f"; needs {', '.join(figure.needs)}" if figure.needs else ""
        needs += f"; {figure.gpus} GPUs" if figure.gpus > 1 else ""
        needs += "".join(f"; {x}" for x in (figure.package, figure.folder) if x)
        lines += [f"{name}: {figure.minutes:g} min{needs}", f"    python {figure.command}"]
        lines += [f"    {reader}" for reader in readers(name)]
    for name, model in TRAINED.items():
        lines += [f"{name}: {model.minutes:g} min; {model.what}", f"    python {model.command}"]
    return "\n".join([*lines, f"of the notebook alone: {', '.join(NOTEBOOK)}"])


def checked() -> tuple[str, bool]:
    """Which figures are stale and why, in words, and whether any is."""
    stale = _published.stale()
    lines = [f"{name}: {why}" for name, why in stale.items()]
    lines += [f"{len(stale)} of {len(FIGURES)} figures are stale"]
    return "\n".join(lines), bool(stale)


# ---------------------------------------------------------------- what it does


def gpus() -> int:
    """How many this Python can measure on."""
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def run(step: Step, gpus: Sequence[int] | None = None) -> str:
    """Nothing if it went well, else what happened. With ``gpus`` it sees only these and writes to a log."""
    log, environment = None, None
    if gpus is not None:
        log = log_of(step).open("w")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with log or contextlib.nullcontext():
        done = subprocess.run(
            [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=log, stderr=log and subprocess.STDOUT,
            check=False,
        )  # fmt: skip
    made = MADE / f"{step.name}.json"
    if done.returncode or step.name in TRAINED:
        return f"ended with {done.returncode}" if done.returncode else ""
    if not made.exists():
        return "wrote no result"
    shutil.move(made, _published.RESULTS / made.name)
    return ""


def log_of(step: Step) -> Path:
    return MADE / f"{step.name}.log"


class Maker:
    """Runs steps in their order, one at a time, or side by side, each on GPUs of its own: then a step is passed over
    until its models are there and so many GPUs are free. ``failed``: names of steps, and what happened."""

    def __init__(self, made: Sequence[Step], there: int, side_by_side: bool = False) -> None:
        self.failed: dict[str, str] = {}
        self._waiting, self._all, self._there = [*made], len(made), there
        self._side_by_side, self._free = side_by_side, [*range(there)]
        self._running: set[str] = set()
        self._changed = threading.Condition()

    def make(self) -> dict[str, str]:
        MADE.mkdir(parents=True, exist_ok=True)
        workers = [threading.Thread(target=self._work) for _ in range(self._there if self._side_by_side else 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            try:
                worker.join()
            except KeyboardInterrupt:  # of the terminal, whose processes get it too
                self._give_up()
                worker.join()
        return self.failed

    def _give_up(self) -> None:
        with self._changed:
            self.failed |= {step.name: "interrupted" for step in self._waiting}
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            step, gpus, number = taken
            where = f" on {', '.join(f'GPU {i}' for i in gpus)}, {log_of(step)}" if self._side_by_side else ""
            print(
                f"\nfigures: {number} of {self._all}, {step.name}, about {step.minutes:g} minutes{where}", flush=True
            )
            began, why = time.monotonic(), self._why_not(step)
            if not why:
                try:
                    why = run(step, gpus) if self._side_by_side else run(step)
                except OSError as error:  # of a log or a result that cannot be written
                    why = str(error)
                minutes = (time.monotonic() - began) / 60
                print(f"figures: {step.name} {why or 'done'}, {minutes:.1f} minutes", flush=True)
            with self._changed:
                if why:
                    self.failed[step.name] = why
                self._running.remove(step.name)
                self._free += gpus
                self._changed.notify_all()

    def _take(self) -> tuple[Step, list[int], int] | None:
        """The next step that may run, its GPUs and its number; None: there are none left."""
        with self._changed:
            while self._waiting:
                to_come = self._running | {step.name for step in self._waiting}
                for step in self._waiting:
                    count = min(step.gpus, self._there)  # one that lacks some says so
                    if to_come.isdisjoint(needs(step.name)) and count <= len(self._free):
                        self._waiting.remove(step)
                        self._running.add(step.name)
                        gpus, self._free = self._free[:count], self._free[count:]
                        return step, gpus, self._all - len(self._waiting)
                self._changed.wait()
        return None

    def _why_not(self, step: Step) -> str:
        lacking = [model for model in needs(step.name) if not (ROOT / TRAINED[model].file).exists()]
        return step.lacks(self._there) or (f"needs {', '.join(lacking)}, whose training failed" if lacking else "")


def needs(name: str) -> tuple[str, ...]:
    return FIGURES[name].needs if name in FIGURES else ()


def draw() -> str:
    """Tables and pictures anew, and the names of stale figures without those that no longer are; what went wrong."""
    stale = _published.stale()
    lines = _published.STALE.read_text(encoding="utf-8").splitlines() if _published.STALE.exists() else []
    kept = [line for line in lines if line.startswith("#") or line in stale]
    _published.STALE.write_text("\n".join([*kept, ""]), encoding="utf-8")
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "figures.py")], cwd=ROOT, check=False)
    return f"docs/figures.py ended with {done.returncode}" if done.returncode else ""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these figures, and the models they need")
    parser.add_argument("--stale", action="store_true", help="those figures that --check names")
    parser.add_argument("--train", action="store_true", help="train models that are there already, too")
    parser.add_argument("--side-by-side", action="store_true", help="on as many GPUs as there are, a step on each")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="every figure, and who shows it")
    what.add_argument("--check", action="store_true", help="which figures are stale, and why")
    what.add_argument("--dry-run", action="store_true", help="only say what would be made")
    args = parser.parse_args(argv)
    args.only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in args.only if name not in FIGURES]:
        parser.error(f"--only: {unknown[0]}; accepted: {', '.join(FIGURES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print(listed())
        return 0
    if args.check:
        told, stale = checked()
        print(told)
        return int(stale)
    names = args.only or [*FIGURES]
    if args.stale:
        names = [name for name in names if name in _published.stale()]
    made = steps(names, args.train)
    if args.dry_run:
        print(plan(made))
        return 0
    there = gpus()
    if not there:
        print(NO_GPU, file=sys.stderr)
        return 2
    print(plan(made, there), flush=True)
    failed = Maker(made, there, args.side_by_side).make()
    if wrong := draw():
        failed["the pages"] = wrong
    good = sum(step.name not in failed for step in made)
    print(f"\nfigures: {good} of {len(made)} steps done")
    for name, why in failed.items():
        print(f"figures: {name}: {why}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
