"""``python -m s2o_cupy`` and ``s2o``: every command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .integrations import commands
from .tools import cli


def parser() -> argparse.ArgumentParser:
    return cli.parser([commands.add])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return cli.main(argv, [commands.add])


if __name__ == "__main__":
    raise SystemExit(main())
