"""Attention of one batch of sequences of equal lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..arrays.torch_compile import outside_graphs
from ..spec import S2OConfig
from .batch import batched
from .call import Call
from .habits import answers_habits
from .known_calls import find_known_call
from .run import parse_config, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..stats import S2OStats
    from .options import Options

__all__ = ["s2o_attention"]

Array = TypeVar("Array")


# fmt: off
@overload
def s2o_attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[False] = ..., return_stats: Literal[False] = ..., **options: Unpack[Options],
) -> Array: ...
@overload
def s2o_attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[True], return_stats: Literal[False] = ..., **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def s2o_attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[False] = ..., return_stats: Literal[True], **options: Unpack[Options],
) -> tuple[Array, S2OStats]: ...
@overload
def s2o_attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[True], return_stats: Literal[True], **options: Unpack[Options],
) -> tuple[Array, Array, S2OStats]: ...
@overload
def s2o_attention(
    q: Array, k: Any, v: Any, *,
    return_lse: bool = ..., return_stats: bool = ..., **options: Unpack[Options],
) -> Any: ...
# fmt: on
@outside_graphs
@answers_habits
def s2o_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    tau: float | Sequence[float] | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """S2O attention: softmax attention that stops early along keys sorted by importance.

    Requirements
    ------------
    Arrays of one framework on one device: NumPy, CuPy, PyTorch or JAX, or any that implements
    ``__dlpack__``. On an NVIDIA GPU (compute capability 8.0 or newer) CuPy is needed and our CUDA
    kernels run; on the CPU the NumPy reference runs. Inference only: there is no backward.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        Queries. The batch axis may be left out of q, k and v alike. head_dim is 1 to 256.
        float16 or bfloat16; on the CPU also float32 and float64.
    k, v : array, (batch, kv_heads, seqlen_k, head_dim)
        Keys and values of q's dtype; heads is a multiple of kv_heads (grouped-query attention).
        Any strides are read in place, but for a last axis that is not contiguous, which is copied.
    tau : float or sequence of float, optional
        Stop threshold >= 0, as a share of the softmax mass found so far, for all heads or one for each query head;
        overrides ``config.tau`` and ``config.error``. 0 is dense attention.
    config : S2OConfig, optional
        How to order keys and when to stop. On the GPU block_m is 64 or 128, and block_n a multiple of
        64 up to 1024; on the CPU both are multiples of 16 up to 1024, and path is "auto".
    scale : float, optional
        Finite factor of the scores; default 1 / sqrt(head_dim).
    softcap : float, default 0
        Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 leaves them as they are. 0.001 to 1e6.
    is_causal : bool, default True
        Query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom-right); seqlen_k >= seqlen_q.
    layout : {"BHSD", "BSHD"}, default "BHSD"
        Order of the axes of q, k, v and the output; "BSHD" is (batch, seqlen, heads, head_dim).
    return_lse : bool, default False
        Also return the log-sum-exp of each row's scores, capped ones with ``softcap``.
    return_stats : bool, default False
        Also return what was visited, and by which kernels.
    out : array, optional
        Where to write the output: as q in framework, shape, dtype and device, with a contiguous last
        axis, apart from q, k and v in memory. Not for JAX, whose arrays are immutable.
    stream : optional
        CUDA stream to run on: a CuPy or torch stream, an object with ``.ptr``, ``.cuda_stream`` or
        ``__cuda_stream__``, or an int handle. Default: the current stream of q's framework. The host
        waits for nothing, except with JAX, which has no public current stream.
    backend : {"auto", "cupy", "numpy"}, default "auto"
        "auto": by the device of the arrays. "numpy" on GPU arrays runs the reference on host copies.

    Returns
    -------
    o : array, like q
    lse : float32 array (batch, heads, seqlen_q), if ``return_lse``
        Natural logarithm, over the visited keys and what the tail counts for the others; with ``tail="none"`` over the
        visited ones only. -inf, with o = 0, for a row that has no key.
    stats : S2OStats, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Notes
    -----
    For inference prefill. Keys are ordered by all of a segment's queries, and rows of a tile stop
    together, so with tau > 0 which keys a row visits depends on *later queries* of its segment, and
    through the common stop on the keys that those see; so does what a tail adds to it, as 16 rows together
    say how far its samples count. Other segments, and with tau 0 every row, depend on nothing later but,
    for ``config.dense_last``, the prompt's length. With ``config.error`` the taus come from segments all
    over the sequence, and so each row depends on all of it. A model trained or decoded token by token sees
    slightly different rows.

    A call on GPU arrays can be captured into a CUDA graph, after one outside the capture has loaded the
    kernels. Results belong to the caller as ever; all other memory of the call belongs to the graph.

    Source: the S2O paper, Algorithm 1 (ordering), Algorithm 2 (dense pass over the segment) and
    Algorithm 3 (sparse pass with early stopping). The tile that triggers the stop is kept here.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import S2OConfig, s2o_attention
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 512, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 2, 512, 64), dtype=np.float32)
    >>> o = s2o_attention(q, k, v)
    >>> o.shape, o.dtype.name
    ((1, 4, 512, 64), 'float32')

    With statistics; tau 0 visits everything:

    >>> config = S2OConfig(segment=128, block_m=64, block_n=64)
    >>> o, lse, stats = s2o_attention(q, k, v, tau=0, config=config, return_lse=True, return_stats=True)
    >>> lse.shape, stats.visited.shape, stats.density
    ((1, 4, 512), (1, 4, 4, 2), 1.0)
    """
    known = None
    if stream is None and return_stats is False and isinstance(backend, str) and backend == "auto":
        known = find_known_call(q, k, v, out, tau, config, scale, softcap, is_causal, layout, return_lse)
        if known is not None:
            done = known.run(q, k, v, out, return_lse)
            if done is not None:
                return done
    config = parse_config(config, tau)
    call = Call({"q": q, "k": k, "v": v}, backend, stream, out)
    batch = batched(tuple([x.form for x in call.infos]), config, call.backend, layout, is_causal, scale, softcap)
    result = run(batch, call, return_lse=return_lse, return_stats=return_stats, config=config)
    if known is not None:
        known.learn(call, batch)
    return result
