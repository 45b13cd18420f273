"""Packages that not everybody needs: which extra of setup.cfg brings each, and how it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["remedy", "with_extra"]

# By what a user calls them -> extra.
EXTRAS = {
    "CuPy": "cuda12",
    "NVRTC": "compile",
    "PyTorch": "torch",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "JAX": "jax",
    "matplotlib": "plot",
    "safetensors": "cli",
}


def remedy(package: str) -> str:
    """How to install a package of EXTRAS. Until s2o_cupy is on an index, its extras are those of a checkout."""
    other = " (or cuda13, by the driver)" if EXTRAS[package] == "cuda12" else ""
    return f'pip install ".[{EXTRAS[package]}]" in a checkout of s2o_cupy{other}'


@contextmanager
def with_extra(module: str, package: str) -> Iterator[None]:
    """Around imports that ``module`` needs ``package`` for: an ImportError says what is missing and what brings it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{module} needs {package}: {error}; remedy: {remedy(package)}", name=error.name) from error
