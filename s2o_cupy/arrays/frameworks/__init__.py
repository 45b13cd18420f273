"""Any framework's arrays in, the same framework's arrays out, on the caller's device and stream.

Each framework is one small class, in a file of its own, that answers the same questions (where is it, give me a native
view, make me an output). *Native* means what a backend computes on: numpy.ndarray for the NumPy backend, what kernels
can be pointed at for the GPU. Views share memory with the caller's array; inputs are never written. A framework is only
touched if one of its arrays came in, so importing this package imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ArgumentTypeError
from .base import Framework
from .cupy import CupyFramework
from .dlpack import DlpackFramework
from .jax import JaxFramework
from .numpy import NumpyFramework
from .torch import TorchFramework

__all__ = ["FRAMEWORKS", "framework_of", "to_host"]

ACCEPTED = "NumPy, CuPy, PyTorch or JAX arrays, or others that implement __dlpack__"

FRAMEWORKS: tuple[Framework, ...] = (
    NumpyFramework(),
    CupyFramework(),
    TorchFramework(),
    JaxFramework(),
    DlpackFramework(),
)

_owner_of_type: dict[type, Framework] = {}


def framework_of(name: str, x: Any, owner: str = "") -> Framework:
    try:
        return _owner_of_type[type(x)]
    except KeyError:
        pass
    for framework in FRAMEWORKS:
        if framework.owns(x):
            _owner_of_type[type(x)] = framework  # who owns an array is a matter of its type
            return framework
    raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: {ACCEPTED}", owner)


def to_host(x: Any) -> np.ndarray:
    """A NumPy array of any framework's array; synchronises if it is on a GPU."""
    return framework_of("array", x).on_host(x)
