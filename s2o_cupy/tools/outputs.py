"""Files that a command is to write, checked before any work."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["check_out", "check_plot"]

_OF_MODELS = re.compile(r"config|token|vocab|index|processor")  # names of JSON files in a model's folder


def check_plot(args: argparse.Namespace) -> None:
    """Before any work, whether a picture that is asked for can be drawn."""
    from .plot import check_picture

    if args.plot is None:
        return
    if missing := check_picture(args.plot, args.command):
        raise ImportError(f"no picture: {missing}")
    _check_apart("--plot", args.plot, args, ("input", "text", "model", "answers", "settings"))


def check_out(args: argparse.Namespace) -> None:
    """Before any work, whether a file that is asked for can be written."""
    if args.out is None:
        return
    target = Path(args.out)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"--out is {args.out!r}; accepted: a file in a folder that exists")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"--out is {args.out!r}; accepted: a place that may be written to")
    _check_apart("--out", args.out, args, ("input", "text", "model", "answers", "plot"))


def _is_a_result(path: Path) -> bool:
    """Whether a file is likely one that a run has written: a picture, or JSON that no model is read from."""
    from .plot import PICTURES

    return path.suffix in PICTURES or (path.suffix == ".json" and not _OF_MODELS.search(path.name))


def _check_apart(option: str, path: str, args: argparse.Namespace, others: Sequence[str]) -> None:
    """Raise if a file to write is one that the run reads, or writes too. Of a folder that is any file in it but what a
    run before may have written: what a model is read from has many names."""
    target = Path(path).resolve()
    for name in others:
        found = getattr(args, name, None)
        for given in [found] if isinstance(found, str) else found or []:
            other = Path(given).resolve()
            if other == target:
                raise ValueError(f"{option} is {path!r}, as {name} is; accepted: a file of its own")
            inside = other in (target.parent, Path(path).parent.resolve())  # the file, or a link to it
            if inside and target.exists() and not _is_a_result(target):
                raise ValueError(
                    f"{option} is {path!r}, a file in the folder that {name} is; accepted: a new file, or one elsewhere"
                )
