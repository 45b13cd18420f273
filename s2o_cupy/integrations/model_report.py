"""What each layer and head of a Hugging Face model does with S2O: density, error, time, and what S2O left and why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from ..api.attention import s2o_attention
from ..api.habits import answers_habits
from ..methods.attention import sparse_attention
from ..methods.own import method_name
from ..spec import S2OConfig
from ..tools.comparing import settings_of
from ..tools.layer_settings import head_name
from ..tools.must_hold import mean_and_error, runs
from ..tools.progress import Report
from ..tools.sampled import Sample, check_segments
from .fallbacks import BY_S2O, WORDS
from .model_arguments import parse_ids, vocabulary_of
from .next_tokens import last_hidden, predicted, text_losses
from .observed import longest_sequence, observed
from .transformers import Asked, S2OAttention

__all__ = ["LayerReport", "LossReport", "ModelReport", "report"]

Tensor = Any  # torch.Tensor

REPEATS = 3  # of a timed call, after one that is not


@dataclass(frozen=True, eq=False)
class LayerReport:
    """One call of a layer's attention.

    Attributes
    ----------
    layer : int
        Counted from 0.
    ran : str
        "s2o", "partly dense", "dense", "method", "dense window", or why the model's own attention did: a key of
        ``S2OAttention.calls``.
    tau, unit, density, error, standard_error, share : numpy.ndarray, (heads,), or None
        float64, units int64. Of a layer that ran S2O: of each head its tau, the keys that are ordered together, pairs
        computed / pairs of dense attention, rel_l2 against dense attention, that sample's standard error, and its part
        of the squared norm of dense attention's output. Of one that ran another method there is no tau, no unit and no
        standard error, as all of it was looked at.
    dense : numpy.ndarray, bool (heads,), or None
        Of a layer that ran S2O: the heads for which nothing was left out, whose tau and unit do not matter.
    segments, segments_total : numpy.ndarray, int64 (heads,), or None
        Of a layer that ran S2O: how many segments of each head were looked at, and how many it has.
    method : str or None
        Of a layer that ran another method: its name and settings.
    ms, dense_ms : float or None
        On a GPU: milliseconds of this attention and of the model's own, medians of three calls after one.
    """

    layer: int
    ran: str
    tau: np.ndarray | None = None
    unit: np.ndarray | None = None
    density: np.ndarray | None = None
    error: np.ndarray | None = None
    standard_error: np.ndarray | None = None
    share: np.ndarray | None = None
    dense: np.ndarray | None = None
    segments: np.ndarray | None = None
    segments_total: np.ndarray | None = None
    method: str | None = None
    ms: float | None = None
    dense_ms: float | None = None

    @property
    def mean_density(self) -> float | None:
        return None if self.density is None else float(self.density.mean())

    @property
    def pooled_error(self) -> float | None:
        """rel_l2 of all heads together."""
        if self.error is None or self.share is None:
            return None
        return float(np.sqrt((self.share * np.square(self.error)).sum()))

    @property
    def told(self) -> str:
        """For the table: the method; or tau and unit, of each head where they differ, or that it was dense."""
        if self.tau is None or self.unit is None or self.dense is None:
            return self.method or self.ran
        if self.dense.all():
            return "dense"
        taus = ["dense" if dense else f"{tau:g}" for tau, dense in zip(self.tau, self.dense, strict=True)]
        units = ["-" if dense else str(unit) for unit, dense in zip(self.unit, self.dense, strict=True)]
        same_unit = len({*units} - {"-"}) == 1
        return f"{_each(taus)}, units of {_each([x for x in units if x != '-'] if same_unit else units)}"


@dataclass(frozen=True)
class LossReport:
    """Nats a token, mean over the predictions of the text."""

    s2o: float
    dense: float
    difference: float
    standard_error: float  # of the difference, runs of 128 tokens taken for independent


@dataclass(frozen=True, eq=False)
class ModelReport:
    """What `report` found.

    Attributes
    ----------
    tokens : int
        Of the longest row.
    layers : tuple of LayerReport
        A call each, in the order that they ran.
    segments, segments_total : int
        How many segments of a head were looked at, and how many it has: of the head with the smallest part.
    calls : dict
        How many calls ran what, as ``S2OAttention.calls``.
    loss : LossReport or None
    """

    tokens: int
    layers: tuple[LayerReport, ...]
    segments: int
    segments_total: int
    calls: dict[str, int]
    loss: LossReport | None

    def table(self) -> str:
        """For a terminal."""
        ran = [x for x in self.layers if x.ran in BY_S2O]
        others = [x for x in self.layers if x.ran == "method"]
        lines = [f"{self.tokens:,} tokens, {len(self.layers)} calls of attention, {len(ran)} by S2O"]
        if others:
            lines[0] += f", {len(others)} by another method"
        if self.loss is not None:
            lines.append(
                f"loss {self.loss.s2o:.4f} nats a token, dense attention {self.loss.dense:.4f}: "
                f"{self.loss.difference:+.4f} +- {self.loss.standard_error:.4f}"
            )
        if ran:
            lines.append(
                f"error and density by {self.segments:,} of {self.segments_total:,} segments"
                f"{' of a head, or a larger part' if len(_looked_at(ran)) > 1 else ''}; error is rel_l2 against dense "
                "attention"
            )
        if others:
            lines.append("error and density of another method by whole calls; error is rel_l2 against dense attention")
        timed = any(x.ms is not None for x in self.layers)
        heading = f"{'layer':>6} {'density':>9} {'error':>9} {'worst head':>18}"
        heading += f" {'ms':>8} {'dense ms':>9}" if timed else ""
        lines += ["", heading + ("   tau" if ran or not others else "   method")]
        lines += [self._line(x, timed) for x in self.layers]
        if timed:
            both = [x for x in self.layers if x.ms is not None and x.dense_ms is not None]
            total, dense = sum(x.ms or 0 for x in both), sum(x.dense_ms or 0 for x in both)
            lines.append(f"{'all':>6} {'':>9} {'':>9} {'':>18} {total:>8.2f} {dense:>9.2f}   {dense / total:.2f} x")
        most_first = sorted(self.calls.items(), key=lambda call: -call[1])
        return "\n".join([*lines, "", *(f"{n:>6}  {what}: {WORDS[what]}" for what, n in most_first)])

    def _line(self, x: LayerReport, timed: bool) -> str:
        if x.error is None or x.density is None:
            line = f"{x.layer:>6} {'':>9} {'':>9} {'':>18}"
        else:
            worst = int(x.error.argmax())
            named = f"{head_name(x.layer, worst)}: {x.error[worst]:.3g}"
            line = f"{x.layer:>6} {x.mean_density:>9.3f} {x.pooled_error:>9.3g} {named:>18}"
        if timed:
            line += " ".join(["", f"{'' if x.ms is None else f'{x.ms:.2f}':>8}",
                              f"{'' if x.dense_ms is None else f'{x.dense_ms:.2f}':>9}"])  # fmt: skip
        return f"{line}   {x.told}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; heads are called layer.head."""
        layers = []
        for x in self.layers:
            row: dict[str, Any] = {"layer": x.layer, "ran": x.ran, "method": x.method}
            row |= {"density": x.mean_density, "error": x.pooled_error, "ms": x.ms, "dense_ms": x.dense_ms}
            names = ("tau", "unit", "dense", "density", "error", "standard_error", "segments", "segments_total")
            there = {name: values for name in names if (values := getattr(x, name)) is not None}
            row["heads"] = {
                head_name(x.layer, h): {name: values[h].item() for name, values in there.items()}
                for h in range(0 if x.error is None else len(x.error))
            }
            layers.append(row)
        return {
            "tokens": self.tokens, "segments": self.segments, "segments_total": self.segments_total,
            "calls": self.calls, "loss": None if self.loss is None else vars(self.loss), "layers": layers,
        }  # fmt: skip

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: density and error by layer and head; grey is what S2O did not take. Needs matplotlib."""
        from ..tools.plot_heads import draw_heads

        panels = {"density": [x.density for x in self.layers], "error": [x.error for x in self.layers]}
        draw_heads(os.fspath(path), f"{self.tokens:,} tokens", [x.layer for x in self.layers], panels)


@answers_habits
def report(
    model: Any,
    input_ids: Any,
    s2o: S2OAttention | None = None,
    *,
    loss: bool = True,
    segments: int = 16,
    seed: int = 0,
    progress: Report | None = None,
    **inputs: Any,
) -> ModelReport:
    """Run a model with S2O on a text, and say what each layer and head did.

    Every layer gets what the layers before it gave with S2O. Density and error of its heads are estimated from a sample
    of its segments, as by `error_per_head`: of the longest sequence, if the batch is padded or packed, and without
    attention sinks. Of another method than S2O they are those of whole calls.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, with attention that goes through its AttentionInterface, as that of Llama does.
    input_ids : int32 or int64 Tensor, (batch, seqlen)
        At least 2 tokens, on the model's device.
    s2o : S2OAttention, optional
        What `register` returned. Default: what is registered under the name that the model's attention has, or under
        "s2o".
    loss : bool, default True
        Measure the model's loss on the text too, with S2O and with dense attention.
    segments, seed : optional
        How many segments of each layer to take, and of their draw.
    progress : callable, optional
        Called with (layers done, layers, what was done).
    **inputs
        Further arguments of the model's forward, such as ``attention_mask``.

    Returns
    -------
    ModelReport
        With ``table()`` for a terminal, ``to_dict()`` for JSON and ``draw(path)``, a heatmap.

    Raises
    ------
    TypeError, ValueError
        Nothing is registered, or an argument is not accepted.
    """
    s2o = _registered(model) if s2o is None else s2o
    if not isinstance(s2o, S2OAttention):
        raise TypeError(f"report: s2o is a {type(s2o).__name__}; accepted: what register returned, or None")
    ids = parse_ids("report", vocabulary_of("report", model), input_ids)
    check_segments("report", segments)
    layers: list[LayerReport] = []
    total = model.config.get_text_config().num_hidden_layers

    def attend(asked: Asked) -> Tensor:
        layer = getattr(asked.module, "layer_idx", None)
        found = LayerReport(len(layers) if layer is None else layer, asked.runs)
        if asked.is_s2o:
            found = _sampled(found, asked, segments, seed)
        elif found.ran == "method":
            found = _measured(found, asked)
        attention = asked.s2o if asked.reason is None else asked.ordinary
        if asked.query.is_cuda:
            found = replace(found, ms=_milliseconds(attention), dense_ms=_milliseconds(asked.ordinary))
        layers.append(found)
        if progress is not None:
            progress(min(len(layers), total), total, f"layer {found.layer}")
        return attention()

    with observed(model, s2o, attend):
        hidden = last_hidden(model, ids, **inputs)
    calls = dict(Counter(x.ran for x in layers))
    measured = _loss(model, ids, s2o, hidden, inputs) if loss and model.get_output_embeddings() else None
    smallest = min(_looked_at(layers), key=lambda of: of[0] / of[1], default=(0, 0))
    return ModelReport(ids.shape[-1], tuple(layers), *smallest, calls, measured)


def _registered(model: Any) -> S2OAttention:
    for name in (model.config._attn_implementation, "s2o"):
        found = AttentionInterface._global_mapping.get(name)
        if isinstance(found, S2OAttention):
            return found
    raise ValueError("report: no S2O is registered; accepted: after s2o_cupy.integrations.transformers.register()")


def _each(words: Sequence[str]) -> str:
    """One for all heads, or one for each where they differ."""
    return " ".join(words if len({*words}) > 1 else words[:1])


def _looked_at(layers: Iterable[LayerReport]) -> set[tuple[int, int]]:
    """Of heads that ran S2O: how many of how many segments were looked at."""
    there = [(x.segments, x.segments_total) for x in layers if x.segments is not None and x.segments_total is not None]
    return {pair for of in there for pair in zip(*(x.tolist() for x in of), strict=True)}


def _sampled(found: LayerReport, asked: Asked, segments: int, seed: int) -> LayerReport:
    """With density and error of each head by its own config."""
    qkv = longest_sequence(asked)
    heads = qkv.q.shape[1]
    configs: list[S2OConfig] = [S2OConfig(tau=0)] * heads
    for group in asked.groups:
        if group.config.error is not None:
            raise ValueError(
                f"report: config.error is {group.config.error}, whose taus each call finds; accepted: a tau, or one "
                "for each head"
            )
        members = np.arange(heads)[group.heads].tolist()
        tau = group.config.tau
        if isinstance(tau, tuple) and len(tau) != len(members):
            raise ValueError(f"report: tau has {len(tau)} numbers; accepted: one, or {len(members)}, one for each head")
        for h, of_head in zip(members, tau if isinstance(tau, tuple) else (tau,) * len(members), strict=True):
            configs[h] = group.config.with_tau(of_head)
    tau, density, error, standard_error, share = np.zeros((5, heads))
    tau[:] = [config.tau_of(qkv.k.shape[2]) for config in configs]
    looked_at, of_all = np.zeros((2, heads), np.int64)
    dense = np.array(asked.dense_heads)
    for base in dict.fromkeys(config.with_tau(0) for config in configs):  # one sample for all of its taus
        sample = Sample(
            qkv, base, segments=segments, seed=seed, function="report", scale=asked.scale, softcap=asked.softcap
        )
        for value in dict.fromkeys(config.tau for config in configs if config.with_tau(0) == base):
            here = np.array([config == base.with_tau(value) for config in configs])
            estimate = sample.estimate(value)
            share[here] = estimate.share.sum(0)[here]
            looked_at[here], of_all[here] = len(sample.segments), sample.geometry.segments
            squared = (estimate.share * np.square(estimate.error)).sum(0)  # of all sequences of the batch
            with np.errstate(divide="ignore", invalid="ignore"):
                error[here] = np.where(squared == 0, 0.0, np.sqrt(squared / estimate.share.sum(0)))[here]
            density[here] = estimate.density.mean(0)[here]
            standard_error[here] = np.sqrt(np.square(estimate.standard_error).mean(0) / len(estimate.error))[here]
    density[dense], error[dense], standard_error[dense] = 1, 0, 0  # the sample is of S2O, at any length
    unit = np.array([config.unit for config in configs])
    return replace(
        found, tau=tau, unit=unit, density=density, error=error, standard_error=standard_error, share=share,
        dense=dense, segments=looked_at, segments_total=of_all,
    )  # fmt: skip


def _measured(found: LayerReport, asked: Asked) -> LayerReport:
    """With density and error of each head by another method."""
    qkv, config = longest_sequence(asked), asked.groups[0].config
    options: dict[str, Any] = {"scale": asked.scale, "softcap": asked.softcap}
    o, stats = sparse_attention(*qkv, config=config, return_stats=True, **options)
    dense = s2o_attention(*qkv, tau=0, **options)
    # [heads], of all sequences
    off, size = (x.float().square().sum((0, 2, 3)).double().cpu().numpy() for x in (o.float() - dense.float(), dense))
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(off == 0, 0.0, np.sqrt(off / size))
    told = ", ".join(filter(None, (method_name(config), settings_of(config))))
    return replace(
        found, density=np.asarray(stats.density_per_head.double().mean(0).cpu()), error=error,
        share=size / size.sum(), method=told,
    )  # fmt: skip


def _milliseconds(run: Callable[[], Any]) -> float:
    """Of the GPU, the median."""
    run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def _loss(model: Any, ids: Tensor, s2o: S2OAttention, hidden: Tensor, inputs: dict[str, Any]) -> LossReport:
    with observed(model, s2o, lambda asked: asked.ordinary()):
        dense_hidden = last_hidden(model, ids, **inputs)
    mask = inputs.get("attention_mask")
    ours, dense = (text_losses(model, x, ids, mask) for x in (hidden, dense_hidden))
    sequence, place = np.indices((ids.shape[0], ids.shape[1] - 1))
    there = slice(None) if mask is None else predicted(mask)
    difference, standard_error = mean_and_error(ours - dense, runs(sequence, place + 1)[there].ravel())
    return LossReport(float(ours.mean()), float(dense.mean()), difference, standard_error)
