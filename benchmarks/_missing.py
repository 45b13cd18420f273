"""A script that lacks a package says which, and what brings it, in place of a traceback. Importing this is enough."""

from __future__ import annotations

import pathlib
import sys
from types import TracebackType

# What a user calls a package, by its module; extras.py knows what brings it.
PACKAGES = {
    "cupy": "CuPy", "torch": "PyTorch", "transformers": "transformers", "diffusers": "diffusers", "jax": "JAX",
    "matplotlib": "matplotlib", "safetensors": "safetensors",
}  # fmt: skip


def said(error: BaseException) -> str | None:
    """What a user needs to know of an ImportError; None of other errors."""
    package = PACKAGES.get((error.name or "").partition(".")[0]) if isinstance(error, ImportError) else None
    if package is None:
        return None
    from s2o_cupy.extras import remedy

    text = str(error)
    return text if "remedy" in text else f"needs {package} ({text}); remedy: {remedy(package)}"


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = said(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"{pathlib.Path(sys.argv[0]).name}: {text}", file=sys.stderr)


sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))  # where s2o_cupy is, unless it is installed
sys.excepthook = _hook
