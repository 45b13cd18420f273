"""A tau for each layer or head of a Hugging Face model, for an error, a density or a loss that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..api.run import parse_config
from ..spec import S2OConfig
from ..tools.layer_curves import LayerCurves, measure_layer
from ..tools.progress import Report
from ..tools.sampled import check_segments
from ..tools.tune import parse_target, parse_taus
from ..tools.tune_layers import (
    LAYER_TAUS,
    Step,
    Trial,
    TunedLayers,
    Units,
    by_density,
    by_error,
    can_be_coarser,
    check_by,
    choose,
    coarser,
    mean_density,
    ordering,
    steps_of,
)  # fmt: skip
from .head_groups import LayerConfigs
from .model_arguments import check_min_seqlen, parse_ids
from .next_tokens import divergence, last_hidden, text_losses
from .observed import longest_sequence, observed
from .transformers import Asked, S2OAttention

__all__ = ["tune_model"]

Tensor = Any  # torch.Tensor

PROBES = 4  # taus at which a layer is tried alone
TINY = 1e-30


def tune_model(
    model: Any,
    input_ids: Any,
    *,
    loss: float | None = None,
    error: float | None = None,
    density: float | None = None,
    by: str = "layer",
    taus: Sequence[float] = LAYER_TAUS,
    config: S2OConfig | None = None,
    min_seqlen: int = 8192,
    segments: int = 16,
    seed: int = 0,
    progress: Report | None = None,
    **inputs: Any,
) -> TunedLayers:
    """Find a tau for each layer of a model, or for each head, on a text.

    Of every layer that S2O takes, error and density are estimated at each tau of the grid, on the q, k and v that dense
    layers give it, from a sample of its segments (`error_per_head`). For a ``loss`` or a ``density`` each layer is then
    tried alone, at four taus of the grid, to see how far the model's predictions move: that is what its error costs.
    One price of it for all layers and heads decides every tau: where a smaller tau saves much of it for few pairs it is
    taken, elsewhere not. For a loss the price is bisected, the model's loss measured with S2O in all layers each time;
    so is one tau for all layers, which is what is found where it takes no more time. Then the price also decides which
    layers are ordered by units `COARSER` times as large, where ordering takes less time and errors are larger; heads
    with taus of their own keep their units.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, with attention that goes through its AttentionInterface, as that of Llama does.
    input_ids : int32 or int64 Tensor, (batch, seqlen)
        At least 2 tokens of a text like those to come, as long as those, on the model's device.
    loss : float, optional
        At most so many nats a token more than with dense attention, mean over the text, two standard errors of that
        mean included. Above 0.
    error : float, optional
        At most this rel_l2: of each layer, of each head, or (by "model") of every layer at one tau.
    density : float, optional
        At most this share of pairs computed, mean over layers and heads. One of the three must be given.
    by : {"layer", "head", "model"}, default "layer"
        What has a tau of its own. Heads of a layer that differ share its call.
    taus : sequence of float
        The grid: at least one number above 0.
    config : S2OConfig, optional
        All but tau.
    min_seqlen : int, default 8192
        As of `register`: which calls are S2O's.
    segments, seed : optional
        How many segments of each layer to take, and of their draw.
    progress : callable, optional
        Called with (steps done, steps at most, what they are of).
    **inputs
        Further arguments of the model's forward.

    Returns
    -------
    TunedLayers
        ``register("s2o", found.config, found.per_layer)`` uses it, ``found.save(path)`` writes the file that
        ``register("s2o", path)`` takes, ``found.table()`` and ``found.draw(path)`` show it.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, S2O takes no layer of the model, or no taus of the grid reach the target.
    """
    here = "tune_model"
    target = parse_target(here, error=error, density=density, loss=loss)
    grid, by = parse_taus(here, taus), check_by(here, by)
    config, ids = parse_config(config, None, here), parse_ids(here, input_ids)
    check_min_seqlen(here, min_seqlen)
    check_segments(here, segments)
    layers = model.config.get_text_config().num_hidden_layers
    probes = layers * min(PROBES, len(grid))
    larger = (probes + layers * (1 + len(grid))) * (can_be_coarser(config) and by != "head")
    steps = {"error": 0, "density": probes, "loss": probes + larger + 24}[target.name]
    count = _Count(progress, layers * (1 + len(grid)) + steps)
    search = _Search(model, ids, inputs, config, min_seqlen, count)

    measure = CurvesOf(grid, segments, seed)
    curves, hidden = search.curves(config, measure)
    if target.name != "error" and curves[0].plain_dense and hidden.is_cuda:
        raise ValueError(
            f"tune_model: on a GPU a call of {curves[0].seqlen_k:,} keys is plain dense attention, of which nothing is "
            "lost; accepted: more tokens, or config=S2OConfig(dense_up_to=0)"
        )
    if target.name == "error":
        return choose(config, target, by, curves, by_error(curves, target.value, by))
    costs = search.costs(curves, hidden, config)
    if target.name == "density":
        return choose(config, target, by, curves, by_density(here, curves, costs, target.value, by))
    return search.by_loss(target, by, curves, costs, hidden, measure)


class CurvesOf(NamedTuple):
    """What `measure_layer` is to look at."""

    grid: Sequence[float]
    segments: int
    seed: int


@dataclass
class _Count:
    """Steps told to ``progress``."""

    report: Report | None
    total: int
    done: int = 0

    def __call__(self, what: str) -> None:
        self.done = min(self.done + 1, self.total)
        if self.report is not None:
            self.report(self.done, self.total, what)


@dataclass
class _Search:
    model: Any
    ids: Tensor
    inputs: dict[str, Any]
    config: S2OConfig
    min_seqlen: int
    step: Callable[[str], None]

    def curves(self, config: S2OConfig, of: CurvesOf) -> tuple[list[LayerCurves], Tensor]:
        """Of the layers that S2O takes, and the last hidden states with dense attention."""
        found: dict[int, LayerCurves] = {}
        left: Counter[str] = Counter()

        def attend(asked: Asked) -> Tensor:
            layer = getattr(asked.module, "layer_idx", None)
            if asked.runs != "s2o" or layer is None:
                left[asked.runs] += 1
            else:
                found[layer] = measure_layer(
                    layer, *longest_sequence(asked), config, of.grid, scale=asked.scale, softcap=asked.softcap,
                    segments=of.segments, seed=of.seed, function="tune_model",
                    step=lambda what: self.step(f"layer {layer}, {what}"),
                )  # fmt: skip
            return asked.ordinary()

        hidden = self._run(self._s2o({}), attend)
        if not found:
            counted = ", ".join(f"{what} ({n})" for what, n in left.most_common()) or "none were asked for"
            raise ValueError(
                f"tune_model: S2O takes no layer of the model on these {self.ids.shape[-1]:,} tokens: {counted}; "
                f"accepted: at least min_seqlen, {self.min_seqlen:,}, tokens, and what S2OAttention takes"
            )
        return [found[layer] for layer in sorted(found)], hidden

    def costs(self, curves: Sequence[LayerCurves], dense: Tensor, config: S2OConfig) -> list[np.ndarray]:
        """Of each layer [taus, heads] what S2O in that layer alone moves the predictions by (`divergence`), shared out
        to its heads by their squared errors. Measured at PROBES taus, the largest among them. ``config``: of the
        curves."""
        found = []
        for layer in curves:
            count = len(layer.taus)
            probed = sorted({n * count // min(PROBES, count) for n in range(min(PROBES, count))})
            moved = []
            for n in probed:
                tau = layer.taus[n]
                moved.append(self._moved_alone(layer.layer, self._s2o({layer.layer: config.with_tau(tau)}), dense))
                self.step(f"layer {layer.layer} alone, units of {config.unit}, tau {tau:g}")
            found.append(shared_out(layer, probed, moved))
        return found

    def _moved_alone(self, layer: int, s2o: S2OAttention, dense: Tensor) -> float:
        """How far the predictions move with S2O in one layer."""

        def attend(asked: Asked) -> Tensor:
            return asked.s2o() if asked.module.layer_idx == layer else asked.ordinary()

        return divergence(self.model, dense, self._run(s2o, attend), self.ids, self.mask)

    def by_loss(
        self, target: Any, by: str, curves: Sequence[LayerCurves], costs: Sequence[np.ndarray], hidden: Tensor,
        of: CurvesOf,
    ) -> TunedLayers:  # fmt: skip
        """The choice that takes the least time of those that the loss allows, by ``by`` or with one tau for all."""
        dense = self._losses(hidden)
        trials: list[Trial] = []
        sizes = [Units(curves, costs, ordering(self.config))]
        if can_be_coarser(self.config) and by != "head":  # heads of one call have one order of units
            config = coarser(self.config)
            larger = self.curves(config, of)[0]
            sizes.append(Units(larger, self.costs(larger, hidden, config), ordering(config)))

        def curves_with(coarse: tuple[int, ...]) -> list[LayerCurves]:
            return [sizes[x.layer in coarse].curves[n] for n, x in enumerate(curves)]

        def measure(step: Step) -> Trial:
            chosen = choose(self.config, target, by, curves, *step)
            s2o = S2OAttention(LayerConfigs.parse(chosen.config, chosen.per_layer), self.min_seqlen)
            # As it will run: also layers that S2O takes and that have no curve.
            more = self._losses(self._run(s2o, lambda asked: asked.s2o() if asked.reason is None else asked.ordinary()))
            off = more - dense
            density = mean_density(curves_with(step.coarse), step.taus)
            work = density + float(np.mean([sizes[x.layer in step.coarse].ordering for x in curves]))
            error = float(off.std() / np.sqrt(off.size))
            trials.append(Trial(density, work, float(off.mean()), error, step.coarse))
            self.step(f"loss at density {density:.3f}: {trials[-1].loss_difference:+.4f}")
            return trials[-1]

        found = [_first_within(steps_of(sizes, kind), target.value, measure) for kind in dict.fromkeys((by, "model"))]
        best = min((x for x in found if x is not None), key=lambda x: x[1].work, default=None)
        if best is None:
            raise ValueError(
                f"tune_model: no taus of the grid have {target}; the smallest have {trials[0].at_most:.4g} with two "
                "standard errors; accepted: at least that, smaller taus, or a longer text"
            )
        (taus, coarse), loss = best
        return choose(
            self.config, target, by, curves_with(coarse), taus, coarse, dense_loss=float(dense.mean()),
            trials=tuple(trials), loss=loss,
        )  # fmt: skip

    def _s2o(self, per_layer: dict[Any, S2OConfig | None]) -> S2OAttention:
        return S2OAttention(LayerConfigs.parse(self.config, per_layer), self.min_seqlen)

    def _run(self, s2o: S2OAttention, attend: Callable[[Asked], Tensor]) -> Tensor:
        with observed(self.model, s2o, attend):
            return last_hidden(self.model, self.ids, **self.inputs)

    def _losses(self, hidden: Tensor) -> np.ndarray:
        return text_losses(self.model, hidden, self.ids, self.mask)

    @property
    def mask(self) -> Tensor | None:
        return self.inputs.get("attention_mask")


def _first_within(
    choices: list[Step], most: float, measure: Callable[[Step], Trial]
) -> tuple[Step, Trial] | None:
    """Of choices from the fastest to the most exact one the first that loses `at_most` so much, by bisection; None if
    the last loses more."""
    low, high = 0, len(choices) - 1
    best = measure(choices[high])
    if best.at_most > most:
        return None
    while low < high:
        middle = (low + high) // 2
        trial = measure(choices[middle])
        if trial.at_most <= most:
            high, best = middle, trial
        else:
            low = middle + 1
    return choices[high], best


def shared_out(layer: LayerCurves, probed: Sequence[int], moved: Sequence[float]) -> np.ndarray:
    """Costs [taus, heads] from a layer's costs at some taus, their numbers ascending: between them by a power of tau,
    beyond the smallest as the squared error falls. A head's part is that of its squared error."""
    squared = layer.squared.sum(1)  # [taus]
    logs = np.log(np.maximum(moved, TINY))
    of_layer = np.exp(np.interp(-np.log(layer.taus), -np.log([layer.taus[n] for n in probed]), logs))
    last = probed[-1]
    of_layer[last:] = moved[-1] * squared[last:] / max(squared[last], TINY)
    return of_layer[:, None] * layer.squared / np.maximum(squared, TINY)[:, None]
