"""benchmarks/video.py: what its input is, and on a GPU a small run of it."""

from __future__ import annotations

import json
import math

import benchmark_modules  # noqa: F401  (finds the scripts)
import numpy as np
import pytest
from conftest import has_gpu

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
import _video  # isort: skip  # noqa: E402
import video as script  # isort: skip  # noqa: E402

SMALL = (3, 8, 10, 16)


def made(heads=3, seed=0, grid=SMALL):
    return script.qkv(script.Grid(*grid), heads, seed, device="cpu")


def test_the_size_is_that_of_video_models():
    assert script.Grid().tokens == 109_632


def test_input_is_the_same_for_a_seed():
    for a, b, other in zip(made(), made(), made(seed=1), strict=True):
        assert a.shape == (1, 3, 3 * 8 * 10 + 16, 128) and a.dtype == torch.bfloat16
        assert torch.equal(a, b) and not torch.equal(a, other)
        assert torch.isfinite(a.float()).all()


def test_near_patches_are_alike_and_text_is_not():
    """Of a smooth scene: the neighbour in a row is nearer than a patch five columns on, and text is noise."""
    _, rows, columns, text = SMALL
    scene = _video.scene(script.Grid(*SMALL), torch.Generator().manual_seed(0))
    patches = scene[text:].reshape(-1, rows, columns, scene.shape[1])
    near = (patches[:, :, 1:] * patches[:, :, :-1]).mean()
    far = (patches[:, :, 5:] * patches[:, :, :-5]).mean()
    assert near > 0.8 > 0.5 > far
    # Products of independent noise: at 16 tokens of 32 channels the mean is within 4 / sqrt(15 * 32) of 0.
    assert abs((scene[1:text] * scene[: text - 1]).mean()) < 4 / math.sqrt(15 * 32)


def test_rotary_positions_turn_and_keep_lengths():
    grid = script.Grid(*SMALL)
    x = torch.randn(grid.tokens, 128, generator=torch.Generator().manual_seed(0))
    y = _video.turned(x, grid)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    same = (y == x).all(dim=1)
    assert same[: grid.text + 1].all() and not same[grid.text + 1 :].any()  # text, and the first patch, at 0, 0, 0


def test_exact_rows_are_dense_attention():
    q, k, v = made()
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    found = script.exact_rows(q, k, v)
    torch.testing.assert_close(found.double(), expected[0, :, :: script.EVERY], rtol=1e-4, atol=1e-5)
    assert script.error(expected, found) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["S2O", "S2O, curve", "S2O, rank=weight", "mean pooling", "Sparge"])
def test_errors_rise_with_what_is_left_out(name):
    """S2O with next to nothing left out is dense attention but for rounding to bfloat16, in the order of the tokens as
    they came."""
    grid = script.Grid(5, 12, 20, 32)
    q, k, v = made(grid=grid)
    attention, exact = script.Attention(name, (q, k, v), grid), script.exact_rows(q, k, v)
    errors = [attention.error(x, exact) for x in (1e-6, 0.9)]
    assert errors[0] < errors[1] and (errors[0] < 2**-8 or not name.startswith("S2O"))


def test_methods_that_are_not_there(capsys):
    with pytest.raises(SystemExit):
        script.parse(["--methods", "S2O;none"])
    assert "none; accepted: S2O; S2O, curve" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_video_on_a_gpu(tmp_path):
    path = tmp_path / "video.json"
    script.main(["--grid", "9,16,16,32", "--heads", "2", "--errors", "0.05", "--repeats", "2", "--json", str(path)])
    dense, *rows = json.loads(path.read_text())["rows"]
    assert dense["rel_l2"] < 0.01
    assert [row["method"] for row in rows] == [*script.METHODS]
    for row in rows:
        assert 0 < row["density"] <= 1
        if row["method"].startswith("S2O"):  # of so short a call others leave out at least a block
            assert row["rel_l2"] < 0.1
        np.testing.assert_allclose(row["ms"] / row["cudnn_ms"], row["x_cudnn"])
