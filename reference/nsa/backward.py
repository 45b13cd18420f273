"""NSA's gradients, given the blocks that were chosen: what each branch does, from the gradient of its output.

With p = exp(s - lse) the weights of the keys that a row sees, and delta = do . o:

    dv = p^T do      ds = p (do v^T - delta)      dq = scale ds k      dk = scale ds^T q

The branches' outputs are added up times their gates, so a branch has do times its gate, and a gate the dot product of
do with its branch's output. The choice of blocks is not differentiated.

Sources: the gradient of a softmax.
Shapes as in `reference.nsa.forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..dense import Array, quiet
from .forward import row_chunks, scale_of, visible_compressed

__all__ = ["Gradients", "compressed_backward", "gate_backward", "selected_backward", "window_backward"]


# Which keys rows see, bool [rows, keys]: where they are in q, their KV head, and their positions.
Sees = Callable[[tuple[int, int, slice], tuple[int, int], Array], Array]


class Gradients(NamedTuple):
    """Like q, k and v."""

    q: Array
    k: Array
    v: Array


def compressed_backward(
    q: Array, k_cmp: Array, v_cmp: Array, o: Array, lse: Array, do: Array, seqlen_k: int, *, length: int, stride: int,
    scale: float | None = None,
) -> Gradients:  # fmt: skip
    """Of `nsa.compressed`, whose ``o`` and ``lse`` these are; ``do`` like o."""

    def sees(at: tuple[int, int, slice], kv: tuple[int, int], p: Array) -> Array:
        return np.arange(k_cmp.shape[2]) < visible_compressed(p, length, stride)[:, None]

    return _backward(q, k_cmp, v_cmp, o, lse, do, sees, scale, seqlen_k)


def selected_backward(
    q: Array, k: Array, v: Array, blocks: Array, o: Array, lse: Array, do: Array, *, block: int,
    scale: float | None = None,
) -> Gradients:  # fmt: skip
    """Of `nsa.selected`."""
    of_key = np.arange(k.shape[2]) // block

    def sees(at: tuple[int, int, slice], kv: tuple[int, int], p: Array) -> Array:
        chosen = (blocks[kv[0], kv[1], at[2], :, None] == of_key).any(axis=1)
        return chosen & (np.arange(k.shape[2]) <= p[:, None])

    return _backward(q, k, v, o, lse, do, sees, scale, k.shape[2])


def window_backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, size: int, *, scale: float | None = None
) -> Gradients:
    """Of `nsa.window` without sinks."""
    j = np.arange(k.shape[2])

    def sees(at: tuple[int, int, slice], kv: tuple[int, int], p: Array) -> Array:
        return (j <= p[:, None]) & (j > p[:, None] - size)

    return _backward(q, k, v, o, lse, do, sees, scale, k.shape[2])


def gate_backward(gates: Array, branches: tuple[Array, ...], do: Array) -> tuple[Array, tuple[Array, ...]]:
    """Of `nsa.gate`: the gates' gradient, shaped as they are, and each branch's."""
    g = gates[:, None] if gates.ndim == 3 else gates
    of_gates = np.stack([(do * o).sum(axis=-1) for o in branches], axis=-1)  # [B, H, Lq, 3]
    of_branches = tuple(g[..., i, None] * do for i in range(len(branches)))
    return (of_gates.sum(axis=1) if gates.ndim == 3 else of_gates), of_branches


@quiet
def _backward(
    q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, sees: Sees, scale: float | None, seqlen_k: int
) -> Gradients:
    found = Gradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v))
    of_scale = scale_of(q, scale)
    for at, kv, p in row_chunks(q, k, seqlen_k):
        seen = sees(at, kv, p)
        s = q[at] @ k[kv].T * of_scale
        weights = np.where(seen, np.exp(s - lse[at][:, None]), 0)  # [rows, K]
        delta = (do[at] * o[at]).sum(axis=-1, keepdims=True)
        ds = np.where(seen, weights * (do[at] @ v[kv].T - delta), 0) * of_scale
        found.q[at] = ds @ k[kv]
        found.k[kv] += ds.T @ q[at]
        found.v[kv] += weights.T @ do[at]
    return found
