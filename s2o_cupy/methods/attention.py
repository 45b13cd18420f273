"""Ways to choose keys, published ones and the caller's own: as schedules, and as attention."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.call import Call
from ..api.gather import gather_attention
from ..api.habits import answers_habits
from ..arrays.frameworks.base import Output
from ..arrays.operand import address, operand
from ..arrays.torch_compile import outside_graphs
from ..errors import arguments_of
from ..plan.schedule_form import ScheduleForm
from ..problem import Problem, cached_validate
from ..schedules.schedule import Schedule
from ..spec import S2OConfig
from .base import MethodConfig
from .head_turns import in_turns
from .own import OwnMethod, as_method

__all__ = ["select", "sparse_attention"]


@outside_graphs
@answers_habits
@arguments_of("select")
def select(
    q: Any,
    k: Any,
    config: Any,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    layout: str = "BHSD",
    stream: Any = None,
    backend: str = "auto",
) -> Schedule:
    """The schedule that a method chooses for q and k.

    Parameters
    ----------
    q, k : arrays as `s2o_attention` takes them
    config : configuration of a method in `s2o_cupy.methods`, such as MeanPoolingConfig, or callable
        Its class says the method. A callable is one of the caller's own (`s2o_cupy.methods.own.Method`): it is called
        with views of q, (batch, heads, seqlen_q, head_dim), and k, and with is_causal and scale, and returns a
        Schedule, which is checked: its content on the CPU alone.
    is_causal, scale, layout, stream, backend : as in `s2o_attention`

    Returns
    -------
    Schedule
        Of q's framework, on q's device, for `gather_attention`.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Notes
    -----
    Nothing waits for the GPU, and a call can be captured into a CUDA graph after one outside of the capture. Keys whose
    mean with others is not finite are chosen. Scores are products as they are: a softcap is for `gather_attention`.
    A method of the caller's own runs on the call's device and stream; whether it waits or can be captured is up to it.
    ``torch.compile`` breaks its graph at the call, and traces nothing of it.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy.methods import MeanPoolingConfig, select
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 1024, 64))
    >>> schedule = select(q, k, MeanPoolingConfig(threshold=0.5))
    >>> schedule.keys.shape
    (1, 2, 8)
    """
    config = as_method(config, s2o=False)
    call = Call({"q": q, "k": k}, backend, stream)
    framework, (of_q, of_k), host = call.framework, call.infos, call.host
    problem = cached_validate(
        (of_q.shape, of_k.shape, of_k.shape), (of_q.dtype, of_k.dtype, of_k.dtype), config.of_pass,
        call.backend, layout, is_causal, scale, 0.0,
    )  # fmt: skip
    config.check(problem)
    if isinstance(config, OwnMethod):
        if problem.empty or not problem.seqlen_k:  # nothing to choose from
            return _fixed(call, problem, {"segment": 128, "is_causal": is_causal})
        with call.scope(), framework.graphs_own(of_q.native, host=host):
            return config.schedule(framework, q, k, problem, layout, of_q.device)
    rules = config.fixed_rules(problem)
    if rules is not None:
        return _fixed(call, problem, rules)
    grid = config.grid(problem)
    form = grid.form(problem.batch, problem.heads, config.order_heads(problem), config.orders_queries,
                     config.value_skip)  # fmt: skip
    with call.scope(), framework.wide_integers():
        with framework.graphs_own(of_q.native, host=host):
            made = _outputs(call, form, problem, grid.entries)
        natives = {name: x.native for name, x in made.items()}
        if not problem.empty:
            (_on_host if host else _on_gpu)(call, natives, problem, config, layout)
        arrays = {name: x.finish() for name, x in made.items()}
    return Schedule(
        arrays["entries"], arrays["begins"], arrays["keys"], arrays.get("k_order"), form, is_sorted=True,
        sink_lists=None, q_order=arrays.get("q_order"),
    )  # fmt: skip


@outside_graphs
@answers_habits
@arguments_of("sparse_attention")
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    config: Any,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """Attention by the method that ``config`` is of: that of `select`'s schedule by `gather_attention`, the same bits.

    Parameters
    ----------
    q, k, v : arrays as `s2o_attention` takes them
    config : S2OConfig, or what `select` takes
        With an S2OConfig it is `s2o_attention`.
    is_causal, scale, softcap, layout, return_lse, return_stats, out, stream, backend : as in `s2o_attention`

    Returns
    -------
    As `gather_attention`: o and, where asked for, lse and stats.

    Raises
    ------
    As `select` and `gather_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy.methods import MeanPoolingConfig, sparse_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 1024, 64))
    >>> o, stats = sparse_attention(q, k, v, config=MeanPoolingConfig(threshold=1), return_stats=True)
    >>> stats.density
    1.0
    """
    options = {
        "scale": scale, "softcap": softcap, "layout": layout, "return_lse": return_lse, "return_stats": return_stats,
        "out": out, "stream": stream, "backend": backend,
    }  # fmt: skip
    method = as_method(config)
    if isinstance(method, S2OConfig):
        return s2o_attention(q, k, v, config=method, is_causal=is_causal, **options)

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        of_selection = {name: options[name] for name in ("scale", "layout", "stream", "backend")}
        schedule = select(q, k, config, is_causal=is_causal, **of_selection)
        return gather_attention(q, k, v, schedule, path=method.path, **options)

    if method.long_lists and not return_stats:
        found = in_turns(attend, (q, k, v), method, is_causal, options)
        if found is not None:
            return found
    return attend(q, k, v, **options)


def _fixed(call: Call, problem: Problem, rules: dict[str, Any]) -> Schedule:
    """Of a dense part alone: lists are empty."""
    from array_api_compat import array_namespace, device

    framework, of_q = call.framework, call.infos[0]
    with call.scope(), framework.wide_integers():
        xp, where = array_namespace(of_q.native), device(of_q.native)
        shape = (1, 1, -(-problem.seqlen_q // rules["segment"]))
        with framework.graphs_own(of_q.native, host=call.host):
            entries = xp.zeros((1,), dtype=xp.int32, device=where)
            begins, keys = (xp.zeros(shape, dtype=dtype, device=where) for dtype in (xp.int64, xp.int32))
        return Schedule.from_lists(
            entries, begins, keys, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
            is_sorted=True, **rules,
        )  # fmt: skip


def _outputs(call: Call, form: ScheduleForm, problem: Problem, entries: int) -> dict[str, Output]:
    lists = (form.batch, form.list_heads, form.rows)
    shapes = {
        "entries": ((problem.batch * problem.heads * entries,), "int32"),
        "begins": (lists, "int64"),
        "keys": (lists, "int32"),
    }
    if form.q_ordered:
        shapes["q_order"] = ((problem.batch, problem.heads, form.seqlen_q), "int32")
    if form.order_batch:
        shapes["k_order"] = ((form.order_batch, form.order_heads, form.seqlen_k), "int32")
    return {name: call.result(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _on_host(
    call: Call, made: dict[str, np.ndarray], problem: Problem, config: MethodConfig, layout: str
) -> None:
    """By the reference."""
    from ..api.on_host import bhsd, blas_ready

    blocks = importlib.import_module("s2o_cupy.reference.methods.blocks")
    method = importlib.import_module(f"s2o_cupy.reference.methods.{config.reference}")
    q, k = (blas_ready(bhsd(x, layout)) for x in call.on_host())
    grid = config.grid(problem)
    found = method.chosen(q, k, config, grid, problem.scale)
    for name, x in zip(("entries", "begins", "keys"), blocks.written(found.columns, grid), strict=True):
        made[name][...] = x
    for name, order in (("k_order", found.k_order), ("q_order", found.q_order)):
        if order is not None:
            made[name][...] = order


def _on_gpu(call: Call, made: dict[str, Any], problem: Problem, config: MethodConfig, layout: str) -> None:
    stream, memory = call.launching()
    from . import launches

    readable = [x if x.has_contiguous_rows else call.copied(x) for x in call.exchanged()]
    q, k = (operand(x, layout) for x in readable)
    where = {name: address(x) for name, x in made.items()}
    launches.run(q, k, where, problem, config, stream=stream, memory=memory)
