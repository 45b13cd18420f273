"""A picture of what each head of each layer does: a heatmap for each quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .whole_files import write_picture

__all__ = ["draw_heads"]


def draw_heads(
    path: str, title: str, layers: Sequence[int], panels: Mapping[str, Sequence[np.ndarray | None]]
) -> None:
    """Write a picture with a heatmap of layers by heads for each of ``panels``: values [heads] of each layer, or None
    of a layer without, which is left grey. "density" is drawn from 0 to 1, others by their logarithms."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    heads = max((len(x) for rows in panels.values() for x in rows if x is not None), default=1)
    height = min(12.0, 1.6 + 0.26 * len(layers))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels) + 0.6, height), squeeze=False)
    for axis, (name, rows) in zip(axes[0], panels.items(), strict=True):
        table = np.full((len(layers), heads), np.nan)
        for row, values in zip(table, rows, strict=True):
            if values is not None:
                row[: len(values)] = values
        _heatmap(figure, axis, table, name, layers)
    axes[0, 0].set_ylabel("layer")
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    figure.tight_layout()
    write_picture(path, figure)


def _heatmap(figure: Any, axis: Any, table: np.ndarray, name: str, layers: Sequence[int]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    positive = table[np.isfinite(table) & (table > 0)]
    if name == "density" or not positive.size:
        norm: Any = Normalize(0, 1)
    else:
        norm = LogNorm(positive.min(), max(positive.max(), 1.01 * positive.min()), clip=True)
    colors = colormaps["viridis"].with_extremes(bad="#cccccc")
    image = axis.imshow(
        np.where(table == 0, positive.min() if positive.size and name != "density" else 0.0, table), norm=norm,
        cmap=colors, aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axis.set_title(name)
    axis.set_xlabel("head")
    every = -(-len(layers) // 40)
    axis.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    axis.set_xticks(range(0, table.shape[1], -(-table.shape[1] // 8)))
    figure.colorbar(image, ax=axis)
