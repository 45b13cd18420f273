"""Versions of the software that S2O is plugged into: the oldest that it works with, and those it was tested with."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import NamedTuple

__all__ = ["DIFFUSERS", "SGLANG", "VLLM", "Tested", "warn_if_newer"]


class Tested(NamedTuple):
    """Of one package. Versions are compared by their leading numbers."""

    package: str  # as pip knows it
    name: str  # as people do
    oldest: str
    newest: str  # that was tested, by the numbers that tell versions apart which may break what is used here

    @property
    def installed(self) -> str | None:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    @property
    def newer(self) -> str | None:
        """Of an installed version that is newer than the newest tested: a sentence that says so."""
        installed = self.installed
        count = self.newest.count(".") + 1
        if installed is None or _numbers(installed, count) <= _numbers(self.newest, count):
            return None
        return f"this is {self.name} {installed}, newer than {self.newest}, the newest that s2o_cupy was tested with"

    def cannot(self, module: str, why: object) -> str:
        """For an ImportError: why ``module`` cannot work with what is installed, and what to do about it."""
        if self.newer:
            return f"{module}: {why}; {self.newer}; remedy: {self._install()}, or a newer s2o_cupy"
        found = "none is installed" if self.installed is None else f"this is {self.installed}"
        return f"{module}: {why}; it needs {self.name} {self.oldest} or newer, and {found}; remedy: {self._install()}"

    def _install(self) -> str:
        return f'pip install "{self.package}=={self.newest}.*"'


def _numbers(version: str, count: int) -> tuple[int, ...]:
    """The first ``count`` numbers: (0, 31) of "0.31.2rc1"."""
    found = []
    for part in version.split(".")[:count]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def warn_if_newer(tested: Tested, log: str) -> None:
    """A line of the logger ``log`` if what is installed is newer than what was tested."""
    if tested.newer:
        logging.getLogger(log).warning(
            "s2o: %s. Compare answers with and without S2O before you rely on it.", tested.newer
        )


VLLM = Tested("vllm", "vLLM", "0.26", "0.33")
SGLANG = Tested("sglang", "SGLang", "0.5.22", "0.5.23")
DIFFUSERS = Tested("diffusers", "diffusers", "0.36", "0.42")
