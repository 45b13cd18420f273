"""examples/tour.ipynb: its cells run, without Jupyter, and print what it was saved with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from in_process import finished

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="needs a source checkout")


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def numbers(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.slow
def test_cells_run_and_print_what_was_saved(monkeypatch):
    """In words the same, in numbers nearly: sums differ by machine, and so does a density where a stop is close."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in code_cells():
        shown.clear()
        code = compile("".join(cell["source"]), str(NOTEBOOK), "exec")
        printed = finished(lambda code=code: exec(code, names)).stdout
        saved = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", saved)
        np.testing.assert_allclose(numbers(printed), numbers(saved), rtol=0.05, atol=2e-4)
        assert len(shown) == sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        plt.close("all")


def test_it_was_saved_after_one_run_of_all_cells():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert NOTEBOOK.stat().st_size < 600_000
