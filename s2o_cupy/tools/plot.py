"""Pictures of S2O at work: attention before and after its permutation, what was visited, and error by density."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..extras import remedy
from ..spec import S2OConfig, tau_text
from .earlier_keys import EarlierKeys, SegmentMap, segment_map
from .whole_files import write_picture

__all__ = ["SegmentMap", "SweepPoint", "check_picture", "draw", "draw_methods", "draw_sweep", "segment_map"]

PICTURES = (".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")


class SweepPoint(NamedTuple):
    tau: float | Sequence[float] | None  # several: by head; None: of an error
    density: float
    rel_l2: float


def check_picture(path: str, owner: str) -> str | None:
    """Why there will be no picture, in words for a reader; or an error of ``owner`` if it cannot be where it was asked
    for."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"it needs matplotlib; remedy: {remedy('matplotlib')}"
    target = Path(path)
    if target.suffix not in PICTURES:
        accepted = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a file that ends in {accepted}")
    if not target.parent.is_dir() or target.is_dir():
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a file in a folder that exists")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a place that may be written to")
    return None


def draw(
    path: str, views: Sequence[SegmentMap], head: int, sweep: Sequence[SweepPoint], config: S2OConfig, source: str,
    overall: Mapping[str, float], names: Sequence[str],
) -> None:  # fmt: skip
    """Write the picture: on the left the attention of ``head`` before and after the permutation, and what each of
    ``views`` visited, a map a head; mass by keys visited, and error by density, on the right. ``overall``: the figures
    of all heads and segments that stand in the title. ``names``: of the heads."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    view = next(x for x in views if x.head == head)
    height = 5.75 + 1.15 * len(views)  # inches
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(13.5, height))
        grid = figure.add_gridspec(
            1, 4, width_ratios=(2.6, 0.035, 0.26, 1), wspace=0.06,
            left=0.055, right=0.975, top=1 - 1.2 / height, bottom=0.55 / height,
        )  # fmt: skip
        left = grid[0].subgridspec(2 + len(views), 1, height_ratios=(1.7, 1.7, *[1] * len(views)), hspace=0.55)
        maps = [figure.add_subplot(left[row]) for row in range(2 + len(views))]
        image = _before_and_after(maps[:2], view, names[head])
        for axis, each in zip(maps[2:], views, strict=True):
            _visited(axis, each, len(views), names[each.head])
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[1]))
        bar.ax.set_title("mass", loc="left", fontsize=9)
        bar.outline.set_visible(False)
        right = grid[3].subgridspec(2, 1, hspace=0.25)
        _mass(figure.add_subplot(right[0]), view, names[head])
        _sweep(figure.add_subplot(right[1]), sweep, config.tau)
        figure.suptitle(
            f"S2O on {source}: queries {view.first:,} to {view.first + len(view.q_order) - 1:,} "
            f"and the {len(view.k_order):,} keys before them",
            x=0.055, y=1 - 0.22 / height, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        stop = f"tau {tau_text(config.tau)}" if config.error is None else f"error {tau_text(config.error)}"
        figure.text(
            0.055, 1 - 0.83 / height,
            f"{stop}, segment {config.segment}, tiles of {config.block_m} queries x {config.block_n} keys in units of "
            f"{config.unit}. Over all heads and segments earlier keys hold {overall['earlier_mass']:.0%} of all mass:\n"
            f"{overall['earlier_pairs_computed']:.0%} of the pairs with them were computed, the others hold "
            f"{overall['earlier_mass_left_out']:.1%} of their mass.",
            fontsize=10, color="#444444",
        )  # fmt: skip
        write_picture(path, figure)


def draw_sweep(path: str, sweep: Sequence[SweepPoint], tau: float | Sequence[float] | None, title: str) -> None:
    """Write a picture of error by density, a point for each tau, with a ring around ``tau``."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
        _sweep(axis, sweep, tau)
        axis.set_title(title)
        write_picture(path, figure)


def draw_methods(
    path: str, methods: Mapping[str, Sequence[tuple[float, float, str]]], labels: tuple[str, str], title: str,
    linear_to: float = 0.0,
) -> None:  # fmt: skip
    """Write a picture of error, a mark for each (x, error, settings) of each method. ``labels``: of x and of errors.
    ``linear_to``: where errors may be below 0, the size up to which their axis is linear."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
        for marker, (name, points) in zip(itertools.cycle("osD^vP*X"), methods.items(), strict=False):
            shown = [(x, y if linear_to else max(y, SMALLEST_ERROR), settings) for x, y, settings in sorted(points)]
            at = [x for x, _, _ in shown], [y for _, y, _ in shown]
            axis.plot(*at, "-", marker=marker, ms=6, lw=1, label=name)
            for x, y, settings in shown:
                axis.annotate(
                    settings, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=7.5, color="#444444"
                )
        if max((x for points in methods.values() for x, _, _ in points), default=1) > 0.7:
            axis.axvline(1, color="#999999", ls=":", lw=1)
        axis.margins(x=0.12, y=0.1)
        axis.set(xlim=(0, None), xlabel=labels[0], ylabel=labels[1])
        if linear_to:
            axis.set_yscale("symlog", linthresh=linear_to)
            axis.axhline(0, color="#999999", ls=":", lw=1)
        else:
            axis.set_yscale("log")
        axis.set_title(title)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
        write_picture(path, figure)


SMALLEST_ERROR = 1e-6  # that a picture shows
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
_VISITED, _STOP = "#1b7f9e", "#00c2e0"


def _pool(mass: np.ndarray) -> np.ndarray:
    """Largest mass of each patch, so that thin stripes survive the picture's resolution: at most 192 x 640 patches."""
    s, c = mass.shape
    rows, columns = max(2, -(-s // 192)), max(4, -(-c // 640))
    mass = np.pad(mass, ((0, -s % rows), (0, -c % columns)))
    return mass.reshape(-(-s // rows), rows, -(-c // columns), columns).max((1, 3))


def _look(view: SegmentMap) -> dict[str, Any]:
    from matplotlib.colors import LogNorm

    s, c = view.mass.shape
    return {
        "cmap": "magma",
        "norm": LogNorm(1e-5, 1e-1, clip=True),
        "extent": (0, c, s, 0),
        "aspect": "auto",
        "interpolation": "nearest",
    }


def _query_ticks(axis: Any, view: SegmentMap) -> None:
    axis.set_yticks(range(0, len(view.mass) + 1, max(view.block_m, 1)))
    axis.set_ylabel("query")


def _before_and_after(axes: Sequence[Any], view: SegmentMap, name: str) -> Any:
    """One head's attention in the order of positions, and in that of S2O."""
    permuted = view.mass[view.q_order][:, view.k_order]
    maps = {
        f"Head {name} before: rows and columns by position": view.mass,
        f"Head {name} after permutation: rows by query order, columns by rank of the key in the segment's order":
            permuted,
    }  # fmt: skip
    for axis, (title, mass) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(_pool(mass), **_look(view))
        axis.set_title(title)
        _query_ticks(axis, view)
    return image


def _visited(axis: Any, view: SegmentMap, heads: int, name: str) -> None:
    """One head's attention in S2O's order, what was not visited in grey."""
    s, c = view.mass.shape
    look, found = _look(view), EarlierKeys.of(view).to_dict()
    axis.imshow(_pool(view.mass[view.q_order][:, view.k_order]), **look)
    grey = np.where(view.visited, np.nan, 1.0)
    axis.imshow(
        grey, cmap="Greys", vmin=0, vmax=1.9, extent=look["extent"], aspect="auto", interpolation="nearest"
    )
    axis.set_title(
        f"Head {name}, visited: {found['earlier_pairs_computed']:.0%} of these pairs; grey was never computed and "
        f"holds {found['earlier_mass_left_out']:.1%} of these keys' mass, which is {found['earlier_mass']:.0%} of all",
        fontsize=9.5,
    )
    _query_ticks(axis, view)
    if heads > 4:  # thin maps
        axis.set_ylabel("")
    for tile, stop in enumerate(view.stops):
        top, bottom = tile * view.block_m, min((tile + 1) * view.block_m, s)
        edges = np.arange(view.block_n, stop, view.block_n)
        axis.vlines(edges, top, bottom, color="white", lw=0.35, alpha=0.55)
        axis.hlines([top] if tile else [], 0, c, color="white", lw=0.6, alpha=0.8)
        axis.vlines([stop], top, bottom, color=_STOP, lw=2.2)
        inside = stop > 0.85 * c
        axis.text(
            stop + (-0.006 if inside else 0.006) * c, (top + bottom) / 2,
            "all keys" if stop == c else f"stop at {stop:,}",
            va="center", ha="right" if inside else "left",
            color="white", fontsize=8.5, fontweight="bold",
        )  # fmt: skip


def _mass(axis: Any, view: SegmentMap, name: str) -> None:
    """Cumulative share of the candidates' mass by keys visited, for each query tile in three orders."""
    s, c = view.mass.shape
    share = np.arange(1, c + 1) / c
    mass = view.mass / max(float(view.mass.sum(dtype=np.float64)) / s, np.finfo(np.float32).tiny)
    permuted = mass[view.q_order][:, view.k_order]
    best = -np.sort(-mass, axis=1)
    axis.plot(share, best.cumsum(1).mean(0), color="#999999", ls=":", label="each query's own best order")
    for tile, stop in enumerate(view.stops):
        rows = permuted[tile * view.block_m : (tile + 1) * view.block_m]
        curve = rows.cumsum(1).sum(0) / max(float(rows.sum(dtype=np.float64)), np.finfo(np.float32).tiny)
        axis.plot(
            share, curve, color=_VISITED, lw=1.2, label="S2O's order, each query tile" if tile == 0 else None
        )
        if stop:
            axis.plot(
                stop / c,
                curve[stop - 1],
                "o",
                color=_VISITED,
                ms=5,
                label="where it stopped" if tile == 0 else None,
            )
    axis.plot(share, mass.cumsum(1).mean(0), color="#d1495b", ls="--", lw=1.2, label="order of position")
    axis.set(
        xlim=(0, 1.01),
        ylim=(0, 1.4),  # room for the legend
        yticks=np.arange(0, 1.1, 0.2),
        xlabel="share of the earlier keys visited",
        ylabel="share of their softmax mass found",
    )
    axis.set_title(f"Head {name}: important keys first")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def sweep_label(tau: float | Sequence[float] | None) -> str:
    """What stands beside a point of a sweep."""
    if tau is None:
        return "error"
    return f"{tau:g}" if isinstance(tau, (int, float)) else "by head"


def _sweep(axis: Any, sweep: Sequence[SweepPoint], tau: float | Sequence[float] | None) -> None:
    density, error = [p.density for p in sweep], [p.rel_l2 for p in sweep]
    axis.plot(density, error, "-o", color=_VISITED, ms=4)
    last = None  # the last point that was labelled
    for i, point in enumerate(sweep):
        here = point.tau == tau
        if here:
            axis.plot(point.density, point.rel_l2, "o", ms=9, mfc="none", mec="#d1495b", mew=1.6)
        near = last and abs(point.density - last.density) < 0.03 and abs(point.rel_l2 - last.rel_l2) < 0.06 * max(error)
        if near and not here:
            continue
        last = point
        axis.annotate(
            sweep_label(point.tau), (point.density, point.rel_l2),
            textcoords="offset points", xytext=(6, 5 + i % 2 * 9),
            fontsize=8.5, color="#d1495b" if here else "#444444", fontweight="bold" if here else "normal",
        )  # fmt: skip
    axis.margins(x=0.12, y=0.1)
    axis.set(
        ylim=(0, None), xlabel="density: pairs computed / causal pairs", ylabel="rel_l2 error against dense"
    )
    axis.set_title("All heads, by tau")
    axis.grid(alpha=0.25)
