"""Command lines run in the process of the tests: a process of its own imports PyTorch, which takes seconds.

On a machine with a GPU scripts have one nevertheless: nothing of a benchmark stays on the GPU.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import has_gpu


class Finished(NamedTuple):
    """What a process would leave."""

    returncode: int
    stdout: str
    stderr: str


def finished(call: Callable[[], object], **environment: str) -> Finished:
    """Of a call that may end as a script does, by SystemExit; a result that is an int is the exit status."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            status = call()
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                err.write(status)
                status = 1
    return Finished(status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())


def run_script(path: Path, *arguments: object, **environment: str) -> Finished:
    """``python path *arguments``; what the script leaves in sys.path is undone."""
    if has_gpu():
        command = [sys.executable, os.fspath(path), *map(str, arguments)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        return Finished(done.returncode, done.stdout, done.stderr)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [os.fspath(path), *map(str, arguments)])
        patch.setattr(sys, "path", [os.fspath(path.parent), *sys.path])
        return finished(lambda: runpy.run_path(os.fspath(path), run_name="__main__") and None, **environment)
