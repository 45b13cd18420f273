"""Errors of attention in every layer of a model whose layers all attend densely: each is given what dense layers give.

So an error is a layer's own, and not what earlier ones did to its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _exact
import torch
from _kinds import Kind, attention
from _small_llama import hooked

from s2o_cupy.integrations.head_groups import LayerConfigs
from s2o_cupy.methods import sparse_attention
from s2o_cupy.methods.own import AnyMethod
from s2o_cupy.tools.tune_layers import TunedLayers

RUNS = 64  # of neighbouring rows, where not all are looked at


def _sparse(
    kind: AnyMethod | TunedLayers, layer: int, q: Any, k: Any, v: Any, scale: float | None
) -> tuple[Any, float]:
    """[batch, heads, seqlen, head_dim] and the density of a layer."""
    configs = LayerConfigs.parse(*(kind.config, kind.per_layer) if isinstance(kind, TunedLayers) else (kind, None))
    out, densities = None, []
    for group in configs.groups(layer, q.shape[1], k.shape[1]) or ():
        part = (q[:, group.heads], k[:, group.kv_heads], v[:, group.kv_heads])
        o, stats = sparse_attention(*part, config=group.config, scale=scale, return_stats=True)
        if o.shape == q.shape:
            return o, stats.density
        out = torch.empty_like(q) if out is None else out
        out[:, group.heads] = o
        densities += [stats.density] * o.shape[1]
    return out, sum(densities) / len(densities)


def runs_of(seqlen: int, rows: int | None) -> list[slice]:
    """About so many rows, in runs of neighbours each in the middle of an equal part; None: all."""
    if rows is None or rows >= seqlen:
        return [slice(0, seqlen)]
    count = min(RUNS, rows)
    part, length = seqlen / count, rows // count
    begins = [int(part * (i + 0.5) - length / 2) for i in range(count)]
    return [slice(begin, begin + length) for begin in begins]


def on_dense_trajectory(model: Any, ids: Any, kinds: Sequence[Kind], rows: int | None = None) -> list[dict[str, Any]]:
    """For each kind of attention, lists by layer, from one run of the model under the first kind, a dense one.

    ``layer_numbers`` of the layers below, those whose every key is in sight; ``rel_l2_by_layer``, pooled over rows and
    heads, to attention in float32 of the same q, k and v; of the errors of single rows of single heads
    ``row_median_by_layer``, ``row_p99_by_layer``, ``row_p999_by_layer``, and the share ``rows_above_half_by_layer``
    of rows that are more wrong than half their length; of about ``rows`` rows of each head, or of all. But for dense
    kinds also ``density_by_layer`` and ``density``, their mean.
    """
    found: list[dict[str, Any]] = [{} for _ in kinds]

    def observed(function: Any, module: Any, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        out = function(module, q, k, v, *args, **options)
        window = options.get("sliding_window")
        if window is not None and window <= k.shape[2]:
            return out
        scale = options.get("scaling")
        runs = runs_of(q.shape[2], rows)
        sampled = lambda o: o if len(runs) == 1 else torch.cat([o[:, :, run] for run in runs], 2)  # noqa: E731
        # [1, heads, rows, head_dim]
        exact = torch.cat([_exact.dense(q, k, v, run.start, run.stop, scale) for run in runs], 2)
        for kind, into in zip(kinds, found, strict=True):
            figures: dict[str, Any] = {}
            if not isinstance(kind, str):
                o, figures["density"] = _sparse(kind, module.layer_idx, q, k, v, scale)
            else:
                with attention(kind):
                    o = function(module, q, k, v, *args, **options)[0].transpose(1, 2)
            o = sampled(o)
            figures |= {"rel_l2": _exact.pooled(_exact.sums(o, exact))["rel_l2"]}
            figures |= _exact.rows(_exact.by_row(o, exact))
            into.setdefault("layer_numbers", []).append(module.layer_idx)
            for name, value in figures.items():
                into.setdefault(f"{name}_by_layer", []).append(value)
        return out

    with attention(kinds[0]) as name:
        model.set_attn_implementation(name)
        with hooked(name, observed):
            model.base_model(ids[None], use_cache=False)
    for into in found:
        if "density_by_layer" in into:
            into["density"] = sum(into["density_by_layer"]) / len(into["density_by_layer"])
    return found
