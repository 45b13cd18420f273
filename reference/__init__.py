"""NumPy ground truth, written to be read.

dense
    Exact attention in float64: what every method is measured against.
s2o
    S2O, one function a stage. Each stage takes the decisions of the stage before it, so that
    another implementation can be compared stage by stage, given its own decisions.
lists
    Attention to keys that are given as data, whatever chose them.
nsa
    NSA, one function a stage: compressed, selected and window branch, and their gradients.
methods
    Published ways to choose blocks of keys.

Nothing here imports CuPy, and nothing on the GPU path imports this package.
"""

from . import dense, lists, s2o
from .dense import compute_dtype, dense_attention
from .s2o import Result, State

__all__ = ["Result", "State", "compute_dtype", "dense", "dense_attention", "lists", "s2o"]
