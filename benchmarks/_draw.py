"""Plots of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import _baselines

Row = dict[str, Any]
STYLES = {"cudnn": ("#444444", "--"), "flash2": ("#999999", ":"), "flash3": ("#666666", "-.")}


def _figure(panels: int, shared: bool, width: float = 5.0, height: float = 4.0) -> tuple[Any, list[Any]]:
    """A figure and the axes of its panels, ``shared``: with one range of y."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", sharey=shared
    )
    found = list(axes.flat)
    for axis in found:
        axis.tick_params(which="both", labelsize=7)
        axis.tick_params(axis="x", which="both", rotation=30)
    for axis in found[panels:]:
        axis.set_visible(False)
    return figure, found[:panels]


def _save(figure: Any, path: str) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def _grouped(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Neighbouring rows that agree in ``keys``."""
    for values, group in groupby(rows, lambda row: tuple(row.get(key) for key in keys)):
        yield values, list(group)


def quality(path: str, rows: Sequence[Row]) -> None:
    """A panel for each input, a line for each order: error against time, or against density where none was measured."""
    inputs = list(_grouped(rows, "input", "length", "offset", "layers"))
    figure, axes = _figure(len(inputs), True)
    x = "s2o_ms" if rows and "s2o_ms" in rows[0] else "density"
    for axis, ((name, length, offset, layers), group) in zip(axes, inputs, strict=True):
        for (order,), line in _grouped(group, "order"):
            line = sorted(line, key=lambda row: row[x])
            axis.plot([row[x] for row in line], [row["rel_l2"] for row in line], "-o", ms=4, label=order)
            for row in line:
                axis.annotate(
                    f"{row['tau']:g}", (row[x], row["rel_l2"]), textcoords="offset points", xytext=(4, 4), fontsize=7
                )
        if x == "s2o_ms":
            for key, (color, style) in STYLES.items():
                if (ms := group[0].get(f"{key}_ms")) is not None:
                    axis.axvline(ms, color=color, ls=style, label=_baselines.TITLES[key])
            axis.set(xscale="log", xlabel="ms")
        else:
            axis.set(xlim=(0, 1.05), xlabel="density")
        axis.set(yscale="log", ylabel="rel_l2")
        where = [str(name), f"{length:,} tokens"]
        where += [f"from {offset:,}"] if offset else []
        where += [f"layers {layers}"] if layers else []
        axis.set_title(", ".join(where), fontsize=10)
        axis.grid(alpha=0.25, which="both")
        axis.legend(fontsize=7, title="rank:means:window:segment:unit", title_fontsize=7)
    _save(figure, path)


def scaling(path: str, rows: Sequence[Row]) -> None:
    """Milliseconds, error, density and memory against length; a line for each tau or error that was asked for."""
    timed = any("s2o_ms" in row for row in rows)
    has_memory = any(row.get("extra_gib", 0) > 0 for row in rows)  # others on the GPU may have freed more meanwhile
    panels = [("s2o_ms", "ms")] if timed else []
    panels += [("density", "density"), ("rel_l2", "rel_l2 of sampled segments")]
    panels += [("extra_gib", "GiB beside inputs and output")] if has_memory else []
    figure, axes = _figure(len(panels), False)
    lines = sorted(rows, key=lambda row: (row["input"], row["order"], row["goal"], row["length"]))
    told = [key for key in ("input", "order", "goal") if key == "goal" or len({row[key] for row in rows}) > 1]
    for axis, (y, title) in zip(axes, panels, strict=True):
        for _, line in _grouped(lines, "input", "order", "goal"):
            points = [(row["length"], row[y]) for row in line if row.get(y, 0) > 0]  # a logarithmic axis
            label = "S2O, " + ", ".join(line[0][key] for key in told)
            axis.plot([p[0] for p in points], [p[1] for p in points], "-o", ms=4, label=label)
        if y == "s2o_ms":
            of_length = {row["length"]: row for row in rows}
            for key, (color, style) in STYLES.items():
                points = [(n, row[f"{key}_ms"]) for n, row in sorted(of_length.items()) if row.get(f"{key}_ms")]
                if points:
                    label = _baselines.TITLES[key]
                    axis.plot([p[0] for p in points], [p[1] for p in points], color=color, ls=style, label=label)
        axis.set(yscale="log", xlabel="tokens", ylabel=title)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        axis.grid(alpha=0.25, which="both")
        axis.legend(fontsize=7)
    _save(figure, path)
