"""The picture of what each head does: a panel's colours are its values', by their logarithms or from 0 to 1."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy.tools.plot_heads import draw_heads

pytest.importorskip("matplotlib")


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Draws, and returns each panel's image and the picture."""
    from matplotlib import pyplot as plt

    def draw(**named):
        figures = []
        monkeypatch.setattr(plt, "close", figures.append)
        path = tmp_path / "heads.png"
        draw_heads(str(path), "title", [0, 3], named)
        images = {axis.get_title(): axis.images[0] for axis in figures[0].axes if axis.images}
        return images, path

    yield draw
    monkeypatch.undo()
    plt.close("all")


def test_scales_of_colours(panels):
    images, path = panels(density=[np.array([0.1, 0.5]), None], tau=[np.array([0.01, 0.1]), np.array([0.0, 1.0])])
    assert path.read_bytes().startswith(b"\x89PNG")
    density, tau = images["density"], images["tau"]
    assert (density.norm.vmin, density.norm.vmax) == (0, 1) and density.norm(0.5) == 0.5
    assert (tau.norm.vmin, tau.norm.vmax) == (0.01, 1.0) and tau.norm(0.1) == pytest.approx(0.5)  # by logarithms
    assert tau.get_array().tolist() == [[0.01, 0.1], [0.01, 1.0]]  # 0, which has none, as the least
    assert np.isnan(np.ma.filled(density.get_array(), np.nan)).tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, 0.0]])
def test_nothing_that_is_positive(panels, values):
    """Taus that are all 0: drawn from 0 to 1, as there is no logarithm."""
    images, _ = panels(tau=[np.array(values), None])
    assert (images["tau"].norm.vmin, images["tau"].norm.vmax) == (0, 1)


def test_heads_that_some_layers_have_not(panels):
    images, _ = panels(tau=[np.array([0.1]), np.array([0.1, 0.2, 0.3])])
    assert np.isnan(np.ma.filled(images["tau"].get_array(), np.nan)).tolist() == [[False, True, True], [False] * 3]
