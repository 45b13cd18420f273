"""The pictures of measured figures in docs, drawn from benchmarks/results/*.json; docs/figures.py calls this.

A picture holds the hash of the files that it was drawn from and of this file, so that a test knows, without drawing,
whether it is out of date.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"

Row = dict[str, Any]
BLUE, ORANGE, GREEN, GREY = "#1b7f9e", "#d9822b", "#3f8f4f", "#555555"
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": "white", "axes.grid": True, "grid.alpha": 0.25,
}  # fmt: skip


class Picture(NamedTuple):
    sources: tuple[str, ...]  # names in benchmarks/results; what is not there is not drawn
    draw: Callable[[dict[str, list[Row]]], Any]  # rows by source -> a figure of matplotlib


def _tokens(axis: Any) -> None:
    """A logarithmic axis of lengths."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("tokens")


def _place(axis: Any, labels: list[tuple[float, float, str, str]], **style: Any) -> None:
    """Labels beside their points, (x, y, text, colour), each at the first of several places where it meets no other
    label and no point, with a line to the point from far away. One that finds no place is left out: times differ from
    run to run, and the table beside the picture has all of them."""
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text

    axis.figure.canvas.draw()
    renderer = axis.figure.canvas.get_renderer()
    style["path_effects"] = [withStroke(linewidth=3, foreground="white")]
    points = [axis.transData.transform((x, y)) for x, y, _, _ in labels]
    boxes: list[Any] = []
    inside = axis.get_window_extent(renderer)
    for x, y, text, colour in labels:
        around = [(far, *d) for far in (7, 14, 24, 36, 50, 70, 95, 125, 160, 200) for d in _directions(far)]
        for far, dx, dy in around:
            line = {"arrowstyle": "-", "color": colour, "lw": 0.6} if far > 30 else None
            side = "left" if dx > 0 else "right" if dx < 0 else "center"
            said = axis.annotate(
                text, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side, va="center", color=colour,
                arrowprops=line, **style,
            )  # fmt: skip
            said.set_in_layout(False)
            said.update_positions(renderer)
            box = Text.get_window_extent(said, renderer).padded(1.5)  # without the line
            free = not any(box.overlaps(other) for other in boxes) and not any(box.contains(*at) for at in points)
            if free and inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1:
                boxes.append(box)
                break
            said.remove()


def _directions(far: float) -> list[tuple[float, float]]:
    between = [(x * far, y * far / 2) for x in (1, -1) for y in (1, -1)] + [
        (x * far / 2, y * far) for x in (1, -1) for y in (1, -1)
    ]
    near = [(far, 0), (-far, 0), (far, far), (far, -far), (-far, far), (-far, -far), (0, far), (0, -far)]
    return near if far < 24 else near + between


def _label(row: Row) -> str:
    """S2O as it is by default, by the default before, or another method."""
    name: str = row["attention"].replace("s2o", "S2O")
    return name if row["config"] == "default" else f'{name}, rank="{row["rank"]}"'


def time_and_loss(rows: dict[str, list[Row]]) -> Any:
    """Time of a call against length beside dense attention's, right answers, and what models lose."""
    from matplotlib import pyplot as plt

    figure, (time, answers, loss) = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")

    calls = sorted((r for r in rows["speed_query"] if r["rank"] == "query"), key=lambda row: row["length"])
    lengths = [row["length"] for row in calls]
    time.plot(lengths, [row["cudnn_ms"] for row in calls], "--s", color=GREY, ms=4, label="dense, cuDNN")
    time.plot(lengths, [row["s2o_ms"] for row in calls], "-o", color=BLUE, ms=5, label="S2O")
    for row in calls:
        time.annotate(
            f"{row['s2o_ms'] / row['cudnn_ms']:.2f}", (row["length"], row["s2o_ms"]), xytext=(3, -12),
            textcoords="offset points", color=BLUE, fontsize=9,
        )  # fmt: skip
    time.set(yscale="log", ylabel="ms", title="Time of a call; beside it S2O / cuDNN")
    time.set(xlim=(lengths[0] / 1.3, lengths[-1] * 1.8), ylim=(0.5, 600))
    time.legend(frameon=False, loc="lower right")
    _tokens(time)

    measured = rows["small_loss"]
    names = dict.fromkeys(row["model"] for row in measured)
    for model, colour in zip(names, (GREEN, ORANGE), strict=False):
        line = [row for row in measured if row["model"] == model and row.get("default")]
        line = sorted(line, key=lambda row: row["length"])
        loss.errorbar(
            [row["length"] for row in line], [row["loss_difference"] for row in line], marker="o", color=colour,
            yerr=[2 * row["loss_difference_sem"] for row in line], capsize=3, label=f"model {model}",
        )  # fmt: skip
    loss.axhline(0, color=GREY, ls="--", lw=1, label="dense")
    loss.set(ylabel="nats a token", title="Loss minus dense, ± 2 standard errors")
    low, high = loss.get_ylim()
    loss.set_ylim(min(low, -0.015), max(high, 0.01))
    loss.legend(frameon=False)
    _tokens(loss)
    loss.margins(x=0.12)

    found = [row for row in rows["retrieval_2"] if row["task"] == "all" and row["attention"] != "cudnn"]
    colours = itertools.cycle((BLUE, ORANGE, GREEN, GREY))
    for kind, colour in zip(dict.fromkeys(map(_label, found)), colours, strict=False):
        line = sorted((row for row in found if _label(row) == kind), key=lambda row: row["length"])
        answers.plot(
            [row["length"] for row in line], [100 * row["right"] for row in line], "-o", ms=4, color=colour, label=kind
        )
    answers.set(ylabel="% right", title="Answers of a retrieval model", ylim=(0, 105))
    answers.legend(frameon=False, loc="lower left")
    _tokens(answers)
    answers.margins(x=0.12)
    return figure


def methods(model: str, rows: dict[str, list[Row]]) -> Any:
    """Loss of one model beyond dense attention's by the time of attention, a mark for each configuration."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9.2, 5.6), layout="constrained")
    groups: dict[str, list[Row]] = {}
    for row in rows["small_methods"]:
        if row["model"] == model and "config" in row:
            groups.setdefault(row["attention"].replace("s2o", "S2O"), []).append(row)
    labels = []
    for i, (name, group) in enumerate(groups.items()):
        group = sorted(group, key=lambda row: row["x_attention"])
        x, y = [row["x_attention"] for row in group], [row["loss_difference"] for row in group]
        (line,) = axis.plot(x, y, "-", marker="osD^vP*X"[i % 8], ms=6, lw=1, label=name)
        labels += [(*at, row["config"], line.get_color()) for *at, row in zip(x, y, group, strict=True)]
    (length,) = {row["length"] for row in rows["small_methods"]}
    axis.axhline(0, color=GREY, ls="--", lw=1)
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set(xlim=(0, 1.05), xlabel="time of attention / cuDNN's", ylabel="nats a token more than dense attention")
    axis.set_title(f"{model}, {length:,} tokens: loss by time; lower and further left is better")
    axis.margins(y=0.08)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    _place(axis, labels, fontsize=8)
    return figure


def scaling(rows: dict[str, list[Row]]) -> Any:
    """Milliseconds, density, error and memory against length; a line for a fixed tau and for a fixed error."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9.2, 6.4), layout="constrained")
    panels = [
        ("s2o_ms", "ms"), ("density", "density"), ("rel_l2", "rel_l2 of sampled segments"),
        ("extra_gib", "GiB beside inputs and output"),
    ]  # fmt: skip
    for axis, (key, title) in zip(axes.flat, panels, strict=True):
        for goal, style in (("tau 0.01", "-o"), ("error 0.06", "--s")):
            line = [row for row in rows["scaling"] if row["goal"] == goal and row[key] > 0]  # a logarithmic axis
            axis.plot([row["length"] for row in line], [row[key] for row in line], style, ms=4, label=f"S2O, {goal}")
        if key == "s2o_ms":
            dense = [row["cudnn_ms"] for row in line]
            axis.plot([row["length"] for row in line], dense, ":", color=GREY, label="dense, cuDNN")
        axis.set(yscale="log", title=title)
        axis.legend(frameon=False, fontsize=8)
        _tokens(axis)
    return figure


PICTURES = {
    "time_and_loss": Picture(("speed_query", "retrieval_2", "small_loss"), time_and_loss),
    "methods_small_1": Picture(("small_methods",), partial(methods, "small_1")),
    "methods_small_2": Picture(("small_methods",), partial(methods, "small_2")),
    "scaling": Picture(("scaling",), scaling),
}


def digest(name: str) -> str:
    """Of everything that a picture is drawn from."""
    files = [RESULTS / f"{source}.json" for source in PICTURES[name].sources]
    found = hashlib.sha256(Path(__file__).read_bytes().replace(b"\r\n", b"\n"))
    for file in files:
        found.update(json.dumps(json.loads(file.read_text(encoding="utf-8"))).encode() if file.exists() else b"none")
    return found.hexdigest()


def path_of(name: str) -> Path:
    return DOCS / f"{name}.png"


def drawn_from(path: Path) -> str | None:
    """The hash that a picture holds: PNG's text with the key "Source"."""
    data = path.read_bytes() if path.exists() else b""
    at = 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        text = data[at + 8 : at + 8 + size]
        if kind == b"tEXt" and text.startswith(b"Source\0"):
            return text.split(b"\0", 1)[1].decode("latin-1")
        at += 12 + size
    return None


def stale() -> list[Path]:
    """Pictures whose data or drawing have changed since they were drawn."""
    return [path_of(name) for name in PICTURES if drawn_from(path_of(name)) != digest(name)]


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    picture = PICTURES[path.stem]
    rows = {
        source: json.loads(file.read_text(encoding="utf-8"))["rows"]
        for source in picture.sources
        if (file := RESULTS / f"{source}.json").exists()
    }
    with plt.rc_context(STYLE):
        figure = picture.draw(rows)
        figure.savefig(path, dpi=130, metadata={"Source": digest(path.stem)})
        plt.close(figure)
