"""The gradients of the selected branch, for arrays of any framework."""

from __future__ import annotations

from typing import Any

from ..api.call import Call
from ..api.habits import answers_habits
from ..api.on_gpu import load_pipeline
from ..arrays import operand
from ..arrays.operand import Operand
from ..arrays.torch_compile import outside_graphs
from ..errors import ArgumentValueError, arguments_of
from ..spec import checked_int
from .call import NsaCall
from .config import LEAST, NSAConfig

__all__ = ["selected_attention_backward"]


@outside_graphs
@answers_habits
@arguments_of("selected_attention_backward")
def selected_attention_backward(
    q: Any,
    k: Any,
    v: Any,
    blocks: Any,
    o: Any,
    lse: Any,
    do: Any,
    block: int = 64,
    *,
    scale: float | None = None,
    workspace_bytes: int = NSAConfig.workspace_bytes,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """Gradients of `selected_attention`, given the blocks.

    Parameters
    ----------
    q, k, v, blocks, block, scale, stream, backend : as in `selected_attention`
        Arrays are (batch, heads, seqlen, head_dim).
    o, lse : arrays like q, and float32 (batch, heads, seqlen_q)
        What `selected_attention` returned.
    do : array like q
        The gradient of o.
    workspace_bytes : int, default 1 GiB
        Bound on the GPU memory of parts of q's gradient: tokens are taken in rounds.

    Returns
    -------
    dq, dk, dv : float32 arrays with the shapes of q, k and v; on the CPU float64 where q is
        Those of the heads of a group are added up. Where q, k or v are not finite, gradients of other rows and keys
        may be NaN.

    Raises
    ------
    As `nsa_attention`.

    Notes
    -----
    Source: the order of loops of Flash Sparse Attention (FSA, ICLR 2026): keys' gradients stay in registers while the
    rows that chose them pass, and no result depends on the order in which threads run.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy.nsa import selected_attention, selected_attention_backward
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 2, 128, 64), dtype=np.float32)
    >>> blocks = np.tile(np.array([0, 1], np.int32), (1, 2, 128, 1))
    >>> o, lse = selected_attention(q, k, v, blocks, return_lse=True)
    >>> dq, dk, dv = selected_attention_backward(q, k, v, blocks, o, lse, do)
    >>> dk.shape
    (1, 2, 128, 64)
    """
    where = "selected_attention_backward"
    block = checked_int("block", block, 1, owner=where)
    workspace_bytes = checked_int("workspace_bytes", workspace_bytes, LEAST["workspace_bytes"], owner=where)
    inputs = {"q": q, "k": k, "v": v, "blocks": blocks, "o": o, "lse": lse, "do": do}
    call = NsaCall(where, Call(inputs, backend, stream), "BHSD", scale)
    problem, of = call.problem, call.infos
    call.check_blocks()
    for name in ("o", "do"):
        call.expect(name, tuple(of["q"].shape), "as q")
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    if tuple(of["lse"].shape) != rows or of["lse"].dtype != "float32":
        raise ArgumentValueError(
            f"lse is {of['lse'].dtype} with shape {tuple(of['lse'].shape)}; accepted: float32 with {rows} "
            "(batch, heads, seqlen_q)",
            where,
        )
    config = NSAConfig(block, of["blocks"].shape[3], 0, 1, length=1, stride=1, workspace_bytes=workspace_bytes)

    def on_host(x: dict[str, Any]) -> tuple[Any, ...]:
        from . import on_host as nsa_on_host

        return nsa_on_host.attend_blocks_backward(x, block, problem)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        load_pipeline()
        from . import backward_launches

        arrays = operand.Call((x["q"], x["k"], x["v"], x["o"]), x["lse"].pointer, 0, problem)
        gradients = backward_launches.Gradients(*results)
        backward_launches.attend_blocks_backward(
            arrays, x["blocks"].pointer, x["do"], gradients, config, stream=stream, memory=memory
        )

    dtype = "float64" if problem.dtype == "float64" else "float32"
    shapes = (tuple(of["q"].shape), tuple(of["k"].shape), tuple(of["k"].shape))
    return call.run(on_host, on_gpu, results=tuple((dtype, shape) for shape in shapes))
