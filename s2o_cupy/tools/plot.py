"""Pictures of S2O at work: attention before and after its permutation, what was visited, and error by density."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..reference import s2o as stages
from ..spec import Geometry, S2OConfig, tau_text

__all__ = ["SegmentMap", "SweepPoint", "check_picture", "draw", "draw_methods", "draw_sweep", "segment_map"]

PICTURES = (".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")


class SegmentMap(NamedTuple):
    """One head's attention of one segment to its candidates (the keys before it)."""

    head: int
    segment: int
    first: int  # position of the segment's first query
    mass: np.ndarray  # [S, C] softmax mass over all visible keys, by position
    q_order: np.ndarray  # [S] offsets
    k_order: np.ndarray  # [C] offsets among the candidates
    stops: np.ndarray  # [T] keys of k_order that each query tile visited
    block_m: int
    block_n: int

    @property
    def skipped_pairs(self) -> float:
        """Share of the (query, candidate) pairs that were never computed."""
        return float(1 - self.visited.mean())

    @property
    def missed_mass(self) -> float:
        """Softmax mass on those pairs, mean of the segment's queries."""
        permuted = self.mass[self.q_order][:, self.k_order]
        return float(np.where(self.visited, 0, permuted).sum(1).mean())

    @property
    def visited(self) -> np.ndarray:
        """bool [S, C], in permuted order."""
        stops = np.repeat(self.stops, self.block_m)[: len(self.q_order)]
        return np.arange(len(self.k_order)) < stops[:, None]


class SweepPoint(NamedTuple):
    tau: float
    density: float
    rel_l2: float


def check_picture(path: str, owner: str) -> str | None:
    """Why there will be no picture, in words for a reader; or an error of ``owner`` if it cannot be where it was asked
    for."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "it needs matplotlib (pip install matplotlib)"
    target = Path(path)
    if target.suffix not in PICTURES:
        accepted = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a file that ends in {accepted}")
    if not target.parent.is_dir() or target.is_dir():
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a file in a folder that exists")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ValueError(f"{owner}: the picture is {path!r}; accepted: a place that may be written to")
    return None


def segment_map(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: S2OConfig, *, head: int, segment: int, scale: float
) -> SegmentMap:
    """Run the reference on one head, causal, and take one segment's view of it.

    q [1, H, L, D], k and v [1, Hkv, L, D]; window 0 is assumed. The decisions are the reference's.
    """
    kv = head * k.shape[1] // q.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q[:1, head : head + 1], k[:1, kv : kv + 1], v[:1, kv : kv + 1]))
    result = stages.s2o(q, k, v, config, scale=scale)
    geometry = Geometry(q.shape[2], k.shape[2], config.segment, config.window, unit=config.unit)
    (first, last), candidates = geometry.queries(segment), geometry.candidates(segment)

    scores = q[0, 0, first:last] @ k[0, 0].T * scale  # [S, Lk]
    hidden = np.arange(k.shape[2]) > np.arange(first, last)[:, None] + geometry.offset
    scores[hidden] = -np.inf
    mass = np.exp(scores - scores.max(1, keepdims=True))
    mass /= mass.sum(1, keepdims=True)

    tiles = -(-(last - first) // config.block_m)
    return SegmentMap(
        head,
        segment,
        first,
        mass[:, :candidates],
        result.q_order[0, 0, segment, : last - first],
        result.k_order[segment][0, 0],
        np.minimum(result.visited[0, 0, segment, :tiles] * config.block_n, candidates),
        config.block_m,
        config.block_n,
    )


def draw(path: str, view: SegmentMap, sweep: Sequence[SweepPoint], config: S2OConfig, source: str) -> None:
    """Write the picture: three maps on the left; mass by keys visited, and error by density, on the right."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(13.5, 8.2))
        grid = figure.add_gridspec(
            3, 4, width_ratios=(2.6, 0.035, 0.26, 1), hspace=0.42, wspace=0.06,
            left=0.055, right=0.975, top=0.87, bottom=0.07,
        )  # fmt: skip
        maps = [figure.add_subplot(grid[row, 0]) for row in range(3)]
        image = _maps(maps, view)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[:, 1]))
        bar.ax.set_title("mass", loc="left", fontsize=9)
        bar.outline.set_visible(False)
        right = grid[:, 3].subgridspec(2, 1, hspace=0.32)
        _mass(figure.add_subplot(right[0]), view)
        _sweep(figure.add_subplot(right[1]), sweep, config.tau)
        figure.suptitle(
            f"S2O on {source}, head {view.head}: queries {view.first:,} to "
            f"{view.first + len(view.q_order) - 1:,} and the {len(view.k_order):,} keys before them",
            x=0.055, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.055, 0.925,
            f"tau {tau_text(config.tau)}, segment {config.segment}, tiles of {config.block_m} queries x "
            f"{config.block_n} keys in units of {config.unit}: {view.skipped_pairs:.0%} of these pairs were never "
            f"computed; they hold "
            f"{view.missed_mass:.1%} of the softmax mass",
            fontsize=10.5, color="#444444",
        )  # fmt: skip
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_sweep(path: str, sweep: Sequence[SweepPoint], tau: float | Sequence[float] | None, title: str) -> None:
    """Write a picture of error by density, a point for each tau, with a ring around ``tau``."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
        _sweep(axis, sweep, tau)
        axis.set_title(title)
        figure.savefig(path, dpi=130)
        plt.close(figure)


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
        for i, (name, points) in enumerate(methods.items()):
            shown = [(x, y if linear_to else max(y, SMALLEST_ERROR), settings) for x, y, settings in sorted(points)]
            at = [x for x, _, _ in shown], [y for _, y, _ in shown]
            axis.plot(*at, "-", marker="osD^vP*X"[i % 8], ms=6, lw=1, label=name)
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
        figure.savefig(path, dpi=130)
        plt.close(figure)


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


def _maps(axes: Sequence[Any], view: SegmentMap) -> Any:
    from matplotlib.colors import LogNorm

    s, c = view.mass.shape
    permuted = view.mass[view.q_order][:, view.k_order]
    look = {
        "cmap": "magma",
        "norm": LogNorm(1e-5, 1e-1, clip=True),
        "extent": (0, c, s, 0),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    stops = "each tile of queries stops by itself" if len(view.stops) > 1 else "its queries stop together"
    titles = (
        "Before: rows and columns by position",
        "After permutation: rows by query order, columns by key order of the segment",
        f"Visited: {stops}; grey was never computed",
    )
    for axis, title, mass in zip(axes, titles, (view.mass, permuted, permuted), strict=True):
        image = axis.imshow(_pool(mass), **look)
        axis.set_title(title)
        axis.set_yticks(range(0, s + 1, max(view.block_m, 1)))
        axis.set_ylabel("query")
    axes[0].set_xlabel("key position")
    axes[1].set_xlabel("rank of the key")
    axes[2].set_xlabel("rank of the key")

    grey = np.where(view.visited, np.nan, 1.0)
    axes[2].imshow(
        grey, cmap="Greys", vmin=0, vmax=1.9, extent=look["extent"], aspect="auto", interpolation="nearest"
    )
    for tile, stop in enumerate(view.stops):
        top, bottom = tile * view.block_m, min((tile + 1) * view.block_m, s)
        edges = np.arange(view.block_n, stop, view.block_n)
        axes[2].vlines(edges, top, bottom, color="white", lw=0.35, alpha=0.55)
        axes[2].hlines([top] if tile else [], 0, c, color="white", lw=0.6, alpha=0.8)
        axes[2].vlines([stop], top, bottom, color=_STOP, lw=2.2)
        inside = stop > 0.85 * c
        axes[2].text(
            stop + (-0.006 if inside else 0.006) * c, (top + bottom) / 2,
            "all keys" if stop == c else f"stop at {stop:,}",
            va="center", ha="right" if inside else "left",
            color="white", fontsize=8.5, fontweight="bold",
        )  # fmt: skip
    return image


def _mass(axis: Any, view: SegmentMap) -> None:
    """Cumulative mass of the candidates by keys visited, for each query tile in three orders."""
    s, c = view.mass.shape
    share = np.arange(1, c + 1) / c
    permuted = view.mass[view.q_order][:, view.k_order]
    best = -np.sort(-view.mass, axis=1)
    axis.plot(share, best.cumsum(1).mean(0), color="#999999", ls=":", label="each query's own best order")
    for tile, stop in enumerate(view.stops):
        rows = permuted[tile * view.block_m : (tile + 1) * view.block_m]
        curve = rows.cumsum(1).mean(0)
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
    axis.plot(share, view.mass.cumsum(1).mean(0), color="#d1495b", ls="--", lw=1.2, label="order of position")
    axis.set(
        xlim=(0, 1.01),
        ylim=(0, 1.4 * axis.get_ylim()[1]),  # room for the legend
        xlabel="share of the earlier keys visited",
        ylabel="softmax mass found",
    )
    axis.set_title("Important keys first")
    axis.legend(frameon=False, fontsize=8, loc="best")


def _sweep(axis: Any, sweep: Sequence[SweepPoint], tau: float | Sequence[float] | None) -> None:
    density, error = [p.density for p in sweep], [p.rel_l2 for p in sweep]
    axis.plot(density, error, "-o", color=_VISITED, ms=4)
    for i, point in enumerate(sweep):
        here = point.tau == tau
        if here:
            axis.plot(point.density, point.rel_l2, "o", ms=9, mfc="none", mec="#d1495b", mew=1.6)
        axis.annotate(
            f"{point.tau:g}", (point.density, point.rel_l2), textcoords="offset points", xytext=(6, 5 + i % 2 * 9),
            fontsize=8.5, color="#d1495b" if here else "#444444", fontweight="bold" if here else "normal",
        )  # fmt: skip
    axis.margins(x=0.12, y=0.1)
    axis.set(
        ylim=(0, None), xlabel="density: pairs computed / causal pairs", ylabel="rel_l2 error against dense"
    )
    axis.set_title("All heads, by tau")
    axis.grid(alpha=0.25)
