"""A tau for each layer or head of a model, from their curves of error and density."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..api.run import parse_config
from ..spec import UNITS, S2OConfig
from . import inputs
from .layer_curves import LayerCurves, measure_layer
from .layer_files import load_layers
from .layer_settings import BY, head_name, plain_config, plain_per_layer
from .loss_search import Trial
from .measured_method import MeasuredMethod
from .progress import Report
from .sampled import Sample
from .tau_ladder import Unit, ladder
from .tuning import DENSE_ON_A_GPU, Target, parse_target, parse_taus
from .whole_files import write_text

__all__ = ["LAYER_TAUS", "TunedLayers", "tune_layers"]

LAYER_TAUS = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005, 0.002)
# Over the unit, about what ordering takes of dense attention's time: of rank="query", for each of a unit's groups of
# keys (30.9 ms for scores, 1.5 for norms and 2.3 for orders beside 255 at 131,072 tokens), and of the other ranks.
ORDERING_BY_QUERY, ORDERING = 0.14, 0.16
COARSER = 4  # times as large are the units of a layer that bears it: as many fewer scores, and less to put in order


@dataclass(frozen=True, eq=False)
class TunedLayers:
    """Taus that reach a target, and what led to them.

    Attributes
    ----------
    config : S2OConfig
        Of layers and heads that ``per_layer`` does not name.
    per_layer : dict
        What `s2o_cupy.integrations.transformers.register` takes beside it.
    target : Target
        What was asked for, of "error", "density" or "loss".
    by : str
        "model", "layer" or "head": what has a tau of its own.
    curves : tuple of LayerCurves
        Of the layers that were tuned, ascending.
    taus : tuple of float64 numpy.ndarray, (heads,)
        The tau of each head of these layers; 0, dense attention, where no tau of the grid reaches an error.
    dense_loss : float or None
        Nats a token with dense attention, where the model's loss was measured.
    trials : tuple of Trial
        In the order that they were made.
    loss : Trial or None
        Of ``taus`` and ``coarse``. Its ``chosen_on`` and ``held_back`` say of each part of the texts what must hold and
        what was measured, and ``held_back_worse`` by how many nats a token the part held back is worse.
    coarse : tuple of int
        Layers ordered by units `COARSER` times as large as config's, so that ordering takes less. Their curves are of
        these units.
    min_seqlen : int or None
        With fewer keys than this S2O is not to run, as it was tuned.
    interrupted : bool
        Whether the search was interrupted: there may be faster taus that hold.
    notes : tuple of str
        What was warned of.
    beside : tuple of MeasuredMethod
        Other methods on the same texts.
    """

    config: S2OConfig
    per_layer: dict[int | tuple[int, int], S2OConfig | None]
    target: Target
    by: str
    curves: tuple[LayerCurves, ...]
    taus: tuple[np.ndarray, ...]
    dense_loss: float | None = None
    trials: tuple[Trial, ...] = ()
    loss: Trial | None = None
    coarse: tuple[int, ...] = ()
    min_seqlen: int | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    beside: tuple[MeasuredMethod, ...] = ()

    @property
    def density(self) -> float:
        """Mean of the tuned layers' heads."""
        return float(np.mean(np.concatenate(self._of_heads("density"))))

    def errors(self) -> list[float]:
        """rel_l2 of each tuned layer."""
        return [
            float(np.sqrt((curves.share * np.square(error)).sum()))
            for curves, error in zip(self.curves, self._of_heads("error"), strict=True)
        ]

    def _of_heads(self, name: str) -> list[np.ndarray]:
        """Error or density of every head at its tau, [heads] for each layer. At tau 0: none, and all."""
        found = []
        for curves, taus in zip(self.curves, self.taus, strict=True):
            values, exact = getattr(curves, name), 0.0 if name == "error" else 1.0
            rows = [curves.taus.index(tau) if tau else None for tau in taus]
            found.append(np.array([exact if n is None else values[n, h] for h, n in enumerate(rows)]))
        return found

    def table(self) -> str:
        """For a terminal."""
        lines = [f"{self.target}, a tau for each {self.by}: density {self.density:.3f}"]
        if self.loss is not None and self.dense_loss is not None:
            lines.append(
                f"loss {self.dense_loss + self.loss.loss_difference:.4f} nats a token, dense attention "
                f"{self.dense_loss:.4f}: {self.loss.loss_difference:+.4f} +- {self.loss.standard_error:.4f}"
            )
            lines += self.loss.table()
        lines += [f"note: {note}" for note in self.notes]
        first = self.curves[0]
        lines += [
            f"error and density by {first.segments:,} of {first.segments_total:,} segments; error is rel_l2 of a layer "
            "against dense attention",
            *([DENSE_ON_A_GPU.format(first.seqlen_k)] if first.plain_dense else []),
            "",
            f"{'layer':>6} {'density':>9} {'error':>9}   tau",
        ]
        densities = self._of_heads("density")
        for curves, taus, density, error in zip(self.curves, self.taus, densities, self.errors(), strict=True):
            one = len({*taus.tolist()}) == 1
            told = f"{taus[0]:g}" if one else " ".join(f"{tau:g}" for tau in taus)
            if curves.layer in self.coarse:
                told += f", units of {coarser(self.config).unit}"
            lines.append(f"{curves.layer:>6} {density.mean():>9.3f} {error:>9.3g}   {told}")
        if any((taus == 0).any() for taus in self.taus):
            lines.append("tau 0 is dense attention: no tau of the grid errs so little there")
        if self.trials:
            lines += ["", f"{'density':>9} {'loss to dense':>14} {'+-':>8} {'moved':>8}   (what was tried)"]
            chosen = self.loss and self.loss.line()
            for line in dict.fromkeys(x.line() for x in self.trials):  # two choices may come to the same
                lines.append(line + ("   chosen" if line == chosen else ""))
        if self.beside:
            lines += ["", f"{'density':>9} {'loss to dense':>14} {'+-':>8} {'moved':>8}   (other methods)"]
            lines += [x.line() for x in self.beside]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: what `register` takes, and what led to it."""
        heads = {
            head_name(curves.layer, h): {"tau": float(taus[h]), "density": float(density[h]), "error": float(error[h])}
            for curves, taus, density, error in zip(
                self.curves, self.taus, self._of_heads("density"), self._of_heads("error"), strict=True
            )
            for h in range(curves.heads)
        }
        layers = [curves.layer for curves in self.curves]
        return {
            "config": plain_config(self.config),
            "per_layer": plain_per_layer(self.config, self.per_layer),
            "min_seqlen": self.min_seqlen,
            "target": asdict(self.target),
            "by": self.by,
            "density": self.density,
            "error_by_layer": dict(zip(map(str, layers), self.errors(), strict=True)),
            "heads": heads,
            "dense_loss": self.dense_loss,
            "loss": None if self.loss is None else self.loss.to_dict(),
            "trials": [x.to_dict() for x in self.trials],
            "interrupted": self.interrupted,
            "notes": [*self.notes],
            "beside": [x.to_dict() for x in self.beside],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file that ``register(config=path)`` takes."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: tau, density and error by layer and head. Needs matplotlib."""
        from .plot_heads import draw_heads

        densities, errors = self._of_heads("density"), self._of_heads("error")
        panels = {"tau": self.taus, "density": densities, "error": errors}
        draw_heads(os.fspath(path), f"{self.target}", [curves.layer for curves in self.curves], panels)


# ---------------------------------------------------------------- choosing


def choose(
    config: S2OConfig, target: Target, by: str, curves: Sequence[LayerCurves], taus: Sequence[np.ndarray],
    coarse: tuple[int, ...] = (), **more: Any,
) -> TunedLayers:  # fmt: skip
    """The result for the tau of every head of the layers, with ``more`` of its fields."""
    per_layer: dict[int | tuple[int, int], S2OConfig | None] = {}
    if by == "model":
        config = config.with_tau(float(taus[0][0]))
        per_layer = {layer: coarser(config) for layer in coarse}
    else:
        for layer, of_heads in zip(curves, taus, strict=True):
            own = coarser(config) if layer.layer in coarse else config
            if len({*of_heads.tolist()}) == 1:
                per_layer[layer.layer] = own.with_tau(float(of_heads[0]))
            else:
                per_layer |= {(layer.layer, h): own.with_tau(float(tau)) for h, tau in enumerate(of_heads)}
    return TunedLayers(config, per_layer, target, by, tuple(curves), tuple(taus), coarse=coarse, **more)


def can_be_coarser(config: S2OConfig) -> bool:
    return config.orders_units and config.unit * COARSER in UNITS


def coarser(config: S2OConfig) -> S2OConfig:
    return replace(config, unit=config.unit * COARSER)


def ordering(config: S2OConfig) -> float:
    """About its part of dense attention's time."""
    of_unit = ORDERING_BY_QUERY * config.groups if config.rank == "query" else ORDERING
    return of_unit / config.unit


def by_error(curves: Sequence[LayerCurves], error: float, by: str) -> list[np.ndarray]:
    """The largest tau of the grid with at most that error: of each head, of each layer, or of all layers at once."""
    found = []
    for layer in curves:
        errors = layer.error if by == "head" else np.sqrt(layer.squared.sum(1, keepdims=True))  # [taus, heads or 1]
        reached = errors <= error
        best = np.where(reached.any(0), np.array(layer.taus)[reached.argmax(0)], 0.0)  # the first is the largest
        found.append(np.broadcast_to(best, layer.heads).copy())
    if by == "model":  # errors need not fall with tau: one at which all layers have it
        reached = np.all([np.sqrt(layer.squared.sum(1)) <= error for layer in curves], axis=0)  # [taus]
        of_all = curves[0].taus[reached.argmax()] if reached.any() else 0.0
        found = [np.full_like(taus, of_all) for taus in found]
    return found


class Units(NamedTuple):
    """What the taus of a grid give with units of one size."""

    curves: Sequence[LayerCurves]
    costs: Sequence[np.ndarray]  # of each layer [taus, heads], what is to be small in sum
    ordering: float = 0.0  # of each layer, a part of dense attention's time


class Step(NamedTuple):
    """A choice."""

    taus: list[np.ndarray]  # [heads] for each layer
    coarse: tuple[int, ...] = ()  # layers with the second size of units


def steps_of(sizes: Sequence[Units], by: str, dense: bool = False) -> list[Step]:
    """From the choice that takes the least time to the most exact one. ``sizes``: one, or with larger units too, which
    are then those of a layer's heads together: ``by`` is not "head". ``dense``: tau 0 too, so that the last choice is
    dense attention everywhere."""
    curves = sizes[0].curves
    places: list[tuple[tuple[int, ...], int | slice]] = []  # of each unit its layers, and its heads in them
    everything = tuple(range(len(curves)))
    if by == "model":
        places = [(everything, slice(None))]
    else:
        for n in everything:
            places += [((n,), h) for h in range(curves[n].heads)] if by == "head" else [((n,), slice(None))]
    units = []
    count = len(curves[0].taus)  # of every layer
    for layers, heads in places:
        over_heads = lambda x, heads=heads: x[:, heads].reshape(count, -1).sum(1)  # noqa: E731
        work = [sum(over_heads(x.curves[n].density + x.ordering) for n in layers) for x in sizes]
        cost = [sum(over_heads(x.costs[n]) for n in layers) for x in sizes]
        if dense:
            work.append(np.array([sum(curves[n].share[heads].size for n in layers)], float))
            cost.append(np.zeros(1))
        units.append(Unit(np.concatenate(work), np.concatenate(cost)))
    found = []
    for choice in ladder(units):
        taus, coarse = [np.zeros(layer.heads) for layer in curves], []
        for (layers, heads), place in zip(places, choice, strict=True):
            for n in layers:
                if place < count * len(sizes):
                    taus[n][heads] = curves[n].taus[place % count]
                    coarse += [curves[n].layer] * (place // count)
        found.append(Step(taus, tuple(sorted(coarse))))
    return found


def curves_with(sizes: Sequence[Units], step: Step) -> list[LayerCurves]:
    """Of every layer those of its units."""
    return [sizes[x.layer in step.coarse].curves[n] for n, x in enumerate(sizes[0].curves)]


def work_of(sizes: Sequence[Units], step: Step) -> float:
    """About the time of a choice, as a part of dense attention's."""
    orders = [
        sizes[x.layer in step.coarse].ordering if taus.any() else 0.0
        for x, taus in zip(sizes[0].curves, step.taus, strict=True)
    ]
    return mean_density(curves_with(sizes, step), step.taus) + float(np.mean(orders))


def mean_density(curves: Sequence[LayerCurves], taus: Sequence[np.ndarray]) -> float:
    values = [
        layer.density[layer.taus.index(tau), h] if tau else 1.0
        for layer, of_heads in zip(curves, taus, strict=True)
        for h, tau in enumerate(of_heads)
    ]
    return float(np.mean(values))


def by_density(
    function: str, curves: Sequence[LayerCurves], costs: Sequence[np.ndarray], density: float, by: str
) -> list[np.ndarray]:
    """The most exact choice with at most that mean density."""
    choices = [step.taus for step in steps_of([Units(curves, costs)], by)]
    least = mean_density(curves, choices[0])
    if least > density:
        raise ValueError(
            f"{function}: no tau of the grid has density at most {density:g}; the least is {least:.4g}; "
            "accepted: no less"
        )
    return [taus for taus in choices if mean_density(curves, taus) <= density][-1]


def check_by(function: str, by: Any) -> str:
    if by not in BY:
        raise ValueError(f"{function}: by is {by!r}; accepted: {', '.join(map(repr, BY))}")
    return str(by)


# ---------------------------------------------------------------- captured layers


def tune_layers(
    source: inputs.Paths | Mapping[int, Any],
    *,
    error: float | None = None,
    density: float | None = None,
    by: str = "layer",
    taus: Sequence[float] = LAYER_TAUS,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    segments: int = 16,
    seed: int = 0,
    place: Callable[[inputs.QKV], Any] = lambda qkv: qkv,
    progress: Report | None = None,
) -> TunedLayers:
    """Find a tau for each layer, or for each head, of layers that `s2o_cupy.integrations.transformers.capture` wrote.

    Parameters
    ----------
    source : path, or mapping
        A folder or a file that ``capture`` wrote, or ``{layer: (q, k, v)}``.
    error : float, optional
        The largest tau with at most this rel_l2, between 0 and 1: of each layer, of each head, or of every layer at
        once.
    density : float, optional
        The taus whose density, mean over heads and layers, is at most this, and with the least sum of the layers'
        squared errors. One of the two must be given.
    by : {"layer", "head", "model"}, default "layer"
        What has a tau of its own. "model": one for all.
    taus : sequence of float
        The grid: at least one number above 0.
    config : S2OConfig, optional
        All but tau.
    scale, softcap, segments, seed : optional
        As of `error_per_head`.
    place : callable, optional
        Of (q, k, v) of a layer, where to compute: `inputs.to_gpu` copies them to the GPU.
    progress : callable, optional
        Called with (steps done, steps, what they are of).

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, or no choice of taus has so small a density.
    """
    target = parse_target("tune", error=error, density=density)
    grid, by = parse_taus("tune", taus), check_by("tune", by)
    config = parse_config(config, None)
    layers = source if isinstance(source, Mapping) else load_layers(source)
    total, done = len(layers) * (1 + len(grid)), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, f"layer {layer}, {what}")

    curves = []
    for layer in sorted(layers):
        qkv = place(inputs.QKV(*layers[layer]))
        sample = Sample(
            qkv, config, segments=segments, seed=seed, function=f"tune: layer {layer}", scale=scale, softcap=softcap
        )
        curves.append(measure_layer(layer, sample, grid, step))
    if target.name == "error":
        found = by_error(curves, target.value, by)
    else:
        found = by_density("tune", curves, [layer.squared for layer in curves], target.value, by)
    return choose(config, target, by, curves, found)
