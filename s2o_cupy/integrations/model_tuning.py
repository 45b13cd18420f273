"""A tau for each layer or head of a Hugging Face model, for an error, a density or a loss that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..api.habits import answers_habits
from ..api.run import parse_config
from ..errors import warn_caller
from ..methods.attention import sparse_attention
from ..methods.own import AnyMethod, as_method, method_name
from ..spec import S2OConfig
from ..tools.comparing import settings_of
from ..tools.layer_curves import LayerCurves, measure_layer, merged
from ..tools.layer_settings import MIN_SEQLEN
from ..tools.loss_search import Trial, fastest
from ..tools.measured_method import MeasuredMethod
from ..tools.must_hold import Lost, Predictions, cut, how_easy, judge, mean_and_error, prices
from ..tools.progress import Report
from ..tools.sampled import Sample, check_segments
from ..tools.tune_layers import (
    LAYER_TAUS,
    Step,
    TunedLayers,
    Units,
    by_density,
    by_error,
    can_be_coarser,
    check_by,
    choose,
    coarser,
    curves_with,
    mean_density,
    ordering,
    steps_of,
    work_of,
)
from ..tools.tuning import Target, parse_target, parse_taus
from .head_groups import LayerConfigs
from .model_arguments import check_min_seqlen, vocabulary_of
from .model_texts import Text, check_held_back, parse_texts
from .next_tokens import Changes, changes, last_hidden
from .observed import longest_sequence, observed
from .transformers import Asked, S2OAttention

__all__ = ["tune_model"]

Tensor = Any  # torch.Tensor

PROBES = 4  # taus at which a layer is tried alone
TINY = 1e-30
TRIES = 24  # with S2O in all layers, about as many as it takes
EASY, REPEATED = 0.5, 0.5  # a text is easy with a smaller loss, in nats a token, or with more repeats


@answers_habits
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
    min_seqlen: int = MIN_SEQLEN,
    answers: Any = None,
    held_back: float = 0.25,
    beside: Sequence[AnyMethod] = (),
    segments: int = 16,
    seed: int = 0,
    progress: Report | None = None,
    **inputs: Any,
) -> TunedLayers:
    """Find a tau for each layer of a model, or for each head, on one text or several.

    Of every layer that S2O takes, error and density are estimated at each tau of the grid, on the q, k and v that dense
    layers give it, from a sample of its segments (`error_per_head`). For a ``loss`` or a ``density`` each layer is then
    tried alone, at four taus of the grid, to see how far the model's predictions move: that is what its error costs.
    One price of it for all layers and heads decides every tau: where a smaller tau saves much of it for few pairs it is
    taken, elsewhere not. For a loss the price is bisected, the model measured with S2O in all layers each time; so is
    one tau for all layers, where that takes less time. The price also decides which layers are ordered by units
    `COARSER` times as large, where ordering takes less time and errors are larger, and which attend densely (tau 0);
    heads with taus of their own keep their units.

    A loss L must hold in several ways at once. Of a group of tokens that is the larger of two means: of the loss beyond
    dense attention's, and of how far predictions move (the Kullback-Leibler divergence from dense attention's).

    - All tokens: at most L, on the part chosen on two standard errors of the loss included.
    - The hardest of the equal parts, 4 to 16, that each text is cut into: at most 2 L.
    - Tokens that the model is unsure of, with dense attention, by 1 nat of entropy or more: at most 2 L. On an ordinary
      text they lose some twice as much as all tokens; on one that the model foretells, as one that repeats itself, they
      are the few that show what a harder text would lose. At least a hundredth of the tokens are looked at.
    - Tokens that a text copies from far away, over 4,096 tokens or an eighth of the text: at most 4 L, if there are 32
      or more.
    - ``answers``: at most 4 L, and at most one in a hundred fewer of them are the likeliest token.

    Of the loss in all but the first two standard errors are taken off, so that noise decides nothing.

    The fastest taus for which all of it holds on the part of the texts that they are chosen on are then checked on the
    part that was held back; where it does not hold there, closer ones are taken until it does. A UserWarning says of a
    text that it is too easy: if its loss is below 0.5 nats a token, or more than half of it repeats what stands before.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, with attention that goes through its AttentionInterface, as that of Llama does.
    input_ids : int32 or int64 Tensor, (batch, seqlen), or a sequence of such
        Texts like those to come, as long as those, on the model's device: each row of each tensor is one, of at least 2
        tokens. Tensors may have different lengths.
    loss : float, optional
        At most so many nats a token more than with dense attention, as above. Above 0.
    error : float, optional
        At most this rel_l2, between 0 and 1: of each layer, of each head, or (by "model") of every layer at one tau.
    density : float, optional
        At most this share of pairs computed, mean over layers and heads. One of the three must be given.
    by : {"layer", "head", "model"}, default "layer"
        What has a tau of its own. Heads of a layer that differ share its call.
    taus : sequence of float
        The grid: at least one number above 0.
    config : S2OConfig, optional
        All but tau.
    min_seqlen : int, default 8192
        As of `register`: which calls are S2O's. It is saved with the result.
    answers : bool Tensor, (batch, seqlen), or a sequence of such and None, optional
        Beside each tensor of ids: which tokens answer something that the text asks. Of a loss.
    held_back : float, default 0.25
        The share of each text, from 0 to 0.5, that taus are not chosen on, of a loss: stretches of it, evenly spaced,
        if above 0 at least one of all.
    beside : sequence of methods, optional
        What `sparse_attention` takes, published methods or one's own: each is run in all layers on the same texts, and
        stands in ``found.beside`` and the table by its density and what it loses.
    segments, seed : optional
        How many segments of each layer to take, and of their draw.
    progress : callable, optional
        Called with (steps done, steps at most, what they are of). `s2o_cupy.tools.progress.progress` gives one that
        shows them and the time left.
    **inputs
        Further arguments of the model's forward. Tensors among them only with one tensor of ids.

    Returns
    -------
    TunedLayers
        ``register("s2o", found.config, found.per_layer)`` uses it, ``found.save(path)`` writes the file that
        ``register("s2o", path)`` takes, ``found.table()`` and ``found.draw(path)`` show it. ``found.loss`` says what
        was measured on both parts, ``found.loss.held_back_worse`` by how many nats a token the held-back one is worse.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, S2O takes no layer of the model, or nothing reaches the target.
    KeyboardInterrupt
        It was interrupted before any taus were verified. Later than that the fastest ones that hold on both parts so
        far are returned, with a UserWarning and ``found.interrupted``.
    """
    here = "tune_model"
    vocabulary = vocabulary_of(here, model)
    target = parse_target(here, error=error, density=density, loss=loss)
    grid, by = parse_taus(here, taus), check_by(here, by)
    config, texts = parse_config(config, None, here), parse_texts(here, vocabulary, input_ids, answers, inputs)
    check_min_seqlen(here, min_seqlen)
    check_segments(here, segments)
    beside = _methods(here, beside)
    share = check_held_back(here, held_back) * (target.name == "loss")
    layers = model.config.get_text_config().num_hidden_layers
    probes, curve = layers * min(PROBES, len(grid)), len(texts) * layers * (1 + len(grid))
    larger = (probes + curve) * (can_be_coarser(config) and by != "head")
    steps = {"error": 0, "density": probes, "loss": probes + larger + TRIES}[target.name]
    count = _Count(progress, curve + steps + len(beside))
    search = _Search(model, texts, config, min_seqlen, count, cut([x for text in texts for x in text.rows], share))

    measure = CurvesOf(grid, segments, seed)
    curves, hidden = search.curves(config, measure)
    if target.name != "error" and curves[0].plain_dense and hidden[0].is_cuda:
        raise ValueError(
            f"tune_model: on a GPU a call of {min(len(x.ids[0]) for x in texts):,} keys is plain dense attention, of "
            "which nothing is lost; accepted: more tokens, or config=S2OConfig(dense_up_to=0)"
        )
    for text, of_text in zip(texts, hidden, strict=True):
        text.hidden = of_text
    if target.name == "error":
        found = choose(config, target, by, curves, by_error(curves, target.value, by))
    else:
        costs = search.costs(curves, config)
        if target.name == "density":
            found = choose(config, target, by, curves, by_density(here, curves, costs, target.value, by))
        else:
            found = search.by_loss(target, by, curves, costs, measure)
    for note in found.notes:
        warn_caller(f"tune_model: {note}")
    measured = () if found.interrupted else tuple(search.measured(method) for method in beside)
    return replace(found, min_seqlen=min_seqlen, beside=measured)


def _methods(here: str, beside: Any) -> tuple[AnyMethod, ...]:
    if not isinstance(beside, (list, tuple)):
        raise TypeError(f"{here}: beside is a {type(beside).__name__}; accepted: a list or tuple of methods")
    for i, method in enumerate(beside):
        as_method(method, f"beside[{i}]", here)
    return tuple(beside)


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
    texts: list[Text]
    config: S2OConfig
    min_seqlen: int
    step: Callable[[str], None]
    of: Predictions

    def curves(self, config: S2OConfig, of: CurvesOf) -> tuple[list[LayerCurves], list[Tensor]]:
        """Of the layers that S2O takes, and of each text the last hidden states with dense attention."""
        found: dict[int, list[LayerCurves]] = {}
        hidden = []
        for n, text in enumerate(self.texts):
            of_text, last = self._curves_of(text, f", text {n + 1}" if len(self.texts) > 1 else "", config, of)
            hidden.append(last)
            for curves in of_text:
                found.setdefault(curves.layer, []).append(curves)
        return [merged(found[layer]) for layer in sorted(found)], hidden

    def _curves_of(self, text: Text, told: str, config: S2OConfig, of: CurvesOf) -> tuple[list[LayerCurves], Tensor]:
        found: list[LayerCurves] = []
        left: Counter[str] = Counter()

        def attend(asked: Asked) -> Tensor:
            layer = getattr(asked.module, "layer_idx", None)
            if not asked.is_s2o or layer is None:
                left[asked.runs] += 1
            else:
                sample = Sample(
                    longest_sequence(asked), config, segments=of.segments, seed=of.seed,
                    function=f"tune_model: layer {layer}", scale=asked.scale, softcap=asked.softcap,
                )  # fmt: skip
                step = lambda what: self.step(f"layer {layer}{told}, {what}")  # noqa: E731
                found.append(measure_layer(layer, sample, of.grid, step))
            return asked.ordinary()

        hidden = self._run(text, self._s2o({}), attend)
        if not found:
            counted = ", ".join(f"{what} ({n})" for what, n in left.most_common()) or "none were asked for"
            raise ValueError(
                f"tune_model: S2O takes no layer of the model on these {text.ids.shape[-1]:,} tokens{told}: {counted}; "
                f"accepted: at least min_seqlen, {self.min_seqlen:,}, tokens, and what S2OAttention takes"
            )
        return found, hidden

    def costs(self, curves: Sequence[LayerCurves], config: S2OConfig) -> list[np.ndarray]:
        """Of each layer [taus, heads] what S2O in that layer alone moves the predictions by (`prices`), shared out to
        its heads by their squared errors. Measured at PROBES taus, the largest among them. ``config``: of the
        curves."""
        found = []
        for layer in curves:
            count = len(layer.taus)
            probed = sorted({n * count // min(PROBES, count) for n in range(min(PROBES, count))})
            moved = []
            for n in probed:
                tau = layer.taus[n]
                alone = self._s2o({layer.layer: config.with_tau(tau)})

                def attend(asked: Asked, only: int = layer.layer) -> Tensor:
                    here = asked.reason is None and getattr(asked.module, "layer_idx", None) == only
                    return asked.s2o() if here else asked.ordinary()

                now = self._changes(alone, attend)
                moved.append(float(prices(self.of, now.entropy) @ now.moved))
                self.step(f"layer {layer.layer} alone, units of {config.unit}, tau {tau:g}")
            found.append(shared_out(layer, probed, moved))
        return found

    def by_loss(
        self, target: Target, by: str, curves: Sequence[LayerCurves], costs: Sequence[np.ndarray], of: CurvesOf
    ) -> TunedLayers:
        """The choice that takes the least time of those that hold, by ``by`` or with one tau for all."""
        sizes = [Units(curves, costs, ordering(self.config))]
        if can_be_coarser(self.config) and by != "head":  # heads of one call have one order of units
            config = coarser(self.config)
            larger = self.curves(config, of)[0]
            sizes.append(Units(larger, self.costs(larger, config), ordering(config)))
        tried: list[tuple[Step, Trial]] = []
        dense: list[np.ndarray] = []

        def measure(step: Step) -> Trial:
            chosen = choose(self.config, target, by, curves, *step)
            s2o = S2OAttention(LayerConfigs.parse(chosen.config, chosen.per_layer), self.min_seqlen)
            # As it will run: also layers that S2O takes and that have no curve.
            now = self._changes(s2o, lambda asked: asked.s2o() if asked.reason is None else asked.ordinary())
            dense[:] = [now.before]
            parts = judge(self.of, Lost(now.loss, now.moved, now.right, now.entropy), target.value)
            density = mean_density(curves_with(sizes, step), step.taus)
            of_all = mean_and_error(now.loss, self.of.run)
            trial = Trial(density, work_of(sizes, step), *of_all, *parts, coarse=step.coarse)
            tried.append((step, trial))
            self.step(f"loss at density {density:.3f}: {trial.loss_difference:+.4f}")
            return trial

        best, notes, interrupted = None, [], False
        try:
            for kind in dict.fromkeys((by, "model")):
                choices = steps_of(sizes, kind, dense=True)
                if best is not None:
                    choices = [x for x in choices if work_of(sizes, x) < best[1].work]
                found = fastest(choices, measure) if choices else None
                best = best if found is None else found
        except KeyboardInterrupt:
            interrupted = True
            best = min((x for x in tried if x[1].holds), key=lambda x: x[1].work, default=None)
            if best is None:
                raise
            notes.append(
                f"interrupted after {len(tried)} tries with S2O in all layers; what is returned is the fastest setting "
                "that was verified by then, and there may be faster ones"
            )
        if best is None:
            last = tried[-1][1]
            raise ValueError(
                f"tune_model: no taus of the grid have {target}, nor has dense attention in S2O's place, by rounding: "
                f"{last.missed.value:.4g} ({last.missed.name}{last.of_held_back}); accepted: a larger loss"
            )
        step, trial = best
        if not any(taus.any() for taus in step.taus) and not all(x.holds for _, x in tried):
            notes.append(f"no taus of the grid hold {target}: every layer attends densely; smaller taus may hold it")
        return choose(
            self.config, target, by, curves_with(sizes, step), *step, dense_loss=float(dense[0].mean()),
            trials=tuple(x for _, x in tried), loss=trial, interrupted=interrupted,
            notes=(*self._easy(dense[0]), *notes),
        )  # fmt: skip

    def measured(self, method: AnyMethod) -> MeasuredMethod:
        """Another method in all layers that S2O takes."""
        densities = []

        def attend(asked: Asked) -> Tensor:
            if asked.reason is not None:
                return asked.ordinary()
            if asked.call.window is None:
                options: dict[str, Any] = {"scale": asked.scale, "softcap": asked.softcap, "return_stats": True}
                densities.append(sparse_attention(*longest_sequence(asked), config=method, **options)[1].density)
            return asked.s2o()

        now = self._changes(S2OAttention(LayerConfigs.parse(method, None), self.min_seqlen), attend)
        density = float(np.mean(densities)) if densities else 1.0
        name, settings = method_name(method), settings_of(method)
        self.step(f"{name}, {settings or 'default'}")
        return MeasuredMethod(name, settings, density, *mean_and_error(now.loss, self.of.run), float(now.moved.mean()))

    def _easy(self, dense: np.ndarray) -> list[str]:
        """What to say of texts that hide what harder ones would lose."""
        found, number = [], 0
        for text in self.texts:
            for _ in text.ids:
                loss, repeated = how_easy(self.of, dense, number)
                number += 1
                if loss < EASY or repeated > REPEATED:
                    found.append(
                        f"text {number} is too easy to show what harder ones lose: its loss with dense attention is "
                        f"{loss:.2f} nats a token, and {repeated:.0%} of its tokens repeat what stands before them; "
                        "the few that the model is unsure of decide; better: harder texts too"
                    )
        return found

    def _changes(self, s2o: S2OAttention, attend: Callable[[Asked], Tensor]) -> Changes:
        """Of the predictions of all texts, as `cut` has them."""
        found = []
        for text in self.texts:
            hidden = self._run(text, s2o, attend)
            of_text = changes(self.model, text.hidden, hidden, text.ids)
            found.append([text.of_predictions(x) for x in of_text])
        return Changes(*(np.concatenate(x) for x in zip(*found, strict=True)))

    def _s2o(self, per_layer: dict[Any, S2OConfig | None]) -> S2OAttention:
        return S2OAttention(LayerConfigs.parse(self.config, per_layer), self.min_seqlen)

    def _run(self, text: Text, s2o: S2OAttention, attend: Callable[[Asked], Tensor]) -> Tensor:
        with observed(self.model, s2o, attend):
            return last_hidden(self.model, text.ids, **text.inputs)


def shared_out(layer: LayerCurves, probed: Sequence[int], moved: Sequence[float]) -> np.ndarray:
    """Costs [taus, heads] from a layer's costs at some taus, their numbers ascending: between them by a power of tau,
    beyond the smallest as the squared error falls. A head's part is that of its squared error."""
    squared = layer.squared.sum(1)  # [taus]
    logs = np.log(np.maximum(moved, TINY))
    of_layer = np.exp(np.interp(-np.log(layer.taus), -np.log([layer.taus[n] for n in probed]), logs))
    last = probed[-1]
    of_layer[last:] = moved[-1] * squared[last:] / max(squared[last], TINY)
    return of_layer[:, None] * layer.squared / np.maximum(squared, TINY)[:, None]
