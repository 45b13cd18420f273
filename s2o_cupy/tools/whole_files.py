"""Files that are written whole or not at all: a failing write leaves what stood in their place."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["whole_file", "write_picture", "write_text"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what ``path`` is to hold: it takes its place at the end of the block, unless an error ends that.

    What is no ordinary file, such as a pipe, and what stands in a folder that takes no new files, is written in place.
    """
    target = Path(path).resolve()
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        yield target
        return
    # With the ending that was asked for, by which writers choose a format: what a link leads to may have none.
    beside = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}{Path(path).suffix}")
    try:
        yield beside
        if beside.exists():
            if target.exists():
                beside.chmod(target.stat().st_mode)
            beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def write_picture(path: str | os.PathLike[str], figure: Any) -> None:
    """``figure`` is one of matplotlib's pyplot, which closes it. A name without an ending is that of a .png."""
    from matplotlib import pyplot

    target = Path(path)
    try:
        with whole_file(target if target.suffix else target.with_suffix(".png")) as file:
            figure.savefig(file, dpi=130, format=target.suffix[1:] or "png")
    finally:
        pyplot.close(figure)
