"""Write the tables of measured figures in README.md and docs/*.md from benchmarks/results/*.json.

    python docs/figures.py            rewrite every table
    python docs/figures.py --check    exit with 1 if one is out of date

A page names a table by a pair of comments; what stands between them is replaced:

    <!-- figures:NAME VIEW -->
    <!-- /figures -->

NAME is a file benchmarks/results/NAME.json as a script of benchmarks/ writes it, VIEW one of VIEWS below ("time" where
it is left out). Without the file the text is "Not measured yet."
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MISSING = "Not measured yet."

_MARKED = re.compile(
    r"(?P<begin><!-- figures:(?P<name>[\w-]+)(?: +(?P<view>\w+))? -->\n)(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any], str]  # heading, value, format


def _key(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _kind(row: Row) -> Any:
    """Of rows with whole configurations: S2O's, another method's, or the name of a dense one."""
    if "config" not in row:
        return row.get("attention")
    return f"{row['attention'].replace('s2o', 'S2O')}, {row['config']}"


def _ratio(above: str, below: str) -> Callable[[Row], Any]:
    return lambda row: row[above] / row[below] if row.get(above) is not None and row.get(below) else None


_TOKENS: list[Column] = [
    ("tokens", _key("length"), ",d"),
    ("rank", _key("rank"), "s"),
    ("tau", _key("tau"), ".3g"),
    ("density", _key("density"), ".3f"),
]
_MODEL: list[Column] = [("model", _key("model"), "s"), ("tokens", _key("length"), ",d"), ("attention", _kind, "s")]
VIEWS: dict[str, list[Column]] = {
    # The whole call beside dense attention.
    "time": [
        *_TOKENS,
        ("S2O ms", _key("s2o_ms"), "ms"),
        ("cuDNN ms", _key("cudnn_ms"), "ms"),
        ("FlashAttention-2 ms", _key("flash2_ms"), "ms"),
        ("FlashAttention-3 ms", _key("flash3_ms"), "ms"),
        ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
        ("rel_l2", _key("rel_l2"), "error"),
        ("cuDNN's rel_l2", _key("cudnn_rel_l2"), "error"),
        ("extra GiB", _key("extra_gib"), ".2f"),
    ],
    # The same, and beside it what models lose with that order and tau at that length (`_with_losses`).
    "cost": [
        *_TOKENS,
        ("S2O ms", _key("s2o_ms"), "ms"),
        ("cuDNN ms", _key("cudnn_ms"), "ms"),
        ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
        ("A's nats to dense", _key("loss_of_A"), "+.4f"),
        ("B's nats to dense", _key("loss_of_B"), "+.4f"),
        ("C's", _key("loss_of_C"), "+.4f"),
        ("rel_l2", _key("rel_l2"), "error"),
        ("cuDNN's rel_l2", _key("cudnn_rel_l2"), "error"),
        ("extra GiB", _key("extra_gib"), ".2f"),
    ],
    # Its parts, and the rate of pass 2 on the pairs it computes.
    "parts": [
        *_TOKENS,
        ("ordering ms", _key("ordering_ms"), "ms"),
        ("tail's sums ms", _key("tail_ms"), "ms"),
        ("pass 1 ms", _key("pass1_ms"), "ms"),
        ("pass 2 ms", _key("pass2_ms"), "ms"),
        ("pass 2 TFLOP/s", _key("pass2_tflops"), ".0f"),
        ("cuDNN TFLOP/s", _key("cudnn_tflops"), ".0f"),
        ("pass 1 / cuDNN", _ratio("pass1_tflops", "cudnn_tflops"), ".2f"),
        ("pass 2 / cuDNN", _ratio("pass2_tflops", "cudnn_tflops"), ".2f"),
    ],
    # Kinds of order, in files whose rows name them.
    "error": [
        ("segment", _key("segment"), "d"),
        ("pooled_queries", _key("pooled_queries"), "d"),
        ("window", _key("window"), "d"),
        ("unit", _key("unit"), "d"),
        *_TOKENS,
        ("rel_l2", _key("rel_l2"), "error"),
        ("rel_l1", _key("rel_l1"), "error"),
        ("S2O ms", _key("s2o_ms"), "ms"),
        ("ordering ms", _key("ordering_ms"), "ms"),
    ],
    # Inputs of several kinds, from benchmarks/quality.py.
    "inputs": [
        ("input", _key("input"), "s"),
        *_TOKENS,
        ("rel_l2", _key("rel_l2"), "error"),
        ("S2O ms", _key("s2o_ms"), "ms"),
        ("cuDNN ms", _key("cudnn_ms"), "ms"),
        ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
    ],
    # Models from end to end, any configuration, from benchmarks/model.py: what is lost and saved in all,
    "loss": [
        *_MODEL,
        ("density", _key("density"), ".3f"),
        ("nats a token", _key("loss"), ".4f"),
        ("more than dense", _key("loss_difference"), "+.4f"),
        ("±", _key("loss_difference_sem"), ".4f"),
        ("likeliest token came", _key("accuracy"), ".2%"),
        ("prefill ms", _key("prefill_ms"), "ms"),
        ("of it attention", _key("attention_ms"), "ms"),
        ("of dense attention's time", _key("x_attention"), ".3f"),
    ],
    # the same in short, models side by side (`_side_by_side`),
    "models": [
        ("tokens", _key("length"), ",d"),
        ("attention", _kind, "s"),
        *(
            (heading.format(model), _key(f"{key}_of_{model}"), form)
            for model in "ABC"
            for heading, key, form in (
                ("{}: nats more than dense", "loss_difference", "+.4f"),
                ("{}: where text is copied", "copies_loss_difference", "+.4f"),
                ("{}: of dense attention's time", "x_attention", ".3f"),
            )
        ),
    ],
    # where in the text,
    "positions": [
        *_MODEL,
        ("more nats than dense, by eighths of the text", _key("loss_difference_by_position"), "+.4f"),
    ],
    # at tokens that the text copies from far away,
    "copies": [
        *_MODEL,
        ("copied tokens", _key("copies"), ".2%"),
        ("their nats", _key("copies_loss"), ".4f"),
        ("more than dense", _key("copies_loss_difference"), "+.4f"),
        ("likeliest token came", _key("copies_accuracy"), ".2%"),
    ],
    # and in which layers and rows.
    "layers": [
        *_MODEL,
        ("rel_l2 by layer", _key("rel_l2_by_layer"), "error"),
        ("99 % of rows below", _key("row_p99_by_layer"), "error"),
        ("99.9 % below", _key("row_p999_by_layer"), "error"),
        ("rows above 0.5", _key("rows_above_half_by_layer"), ".2%"),
    ],
    # Where an error was asked for.
    "asked": [
        *_MODEL,
        ("rel_l2 by layer", _key("rel_l2_by_layer"), "error"),
        ("density by layer", _key("density_by_layer"), "error"),
    ],
    # Questions to a pretrained model about a long text, from benchmarks/tasks.py.
    "tasks": [
        ("task", _key("task"), "s"),
        *_MODEL,
        ("density", _key("density"), ".3f"),
        ("right answers", _key("right"), ".1%"),
        ("right tokens", _key("right_tokens"), ".1%"),
        ("answered as by dense", _key("as_dense"), ".1%"),
    ],
    # Answers of the retrieval model, from benchmarks/tasks.py --retrieval.
    "answers": [
        *_MODEL[1:],
        ("density", _key("density"), ".3f"),
        ("right answers", _key("right"), ".1%"),
        ("right tokens", _key("right_tokens"), ".1%"),
        ("over 32,768 tokens away", _key("right_beyond"), ".1%"),
        ("of dense attention's time", _key("x_attention"), ".3f"),
    ],
    # Calls that wait for each other on the GPU, and how long a call keeps the host busy.
    "queued": [
        *_TOKENS,
        ("S2O ms, queued", _key("s2o_queued_ms"), "ms"),
        ("cuDNN ms, queued", _key("cudnn_queued_ms"), "ms"),
        ("FlashAttention-2 ms, queued", _key("flash2_queued_ms"), "ms"),
        ("FlashAttention-3 ms, queued", _key("flash3_queued_ms"), "ms"),
        ("S2O / cuDNN", _key("x_cudnn_queued"), ".3f"),
        ("host µs, PyTorch", _key("host_us"), ".0f"),
        ("host µs, CuPy", _key("host_us_cupy"), ".0f"),
    ],
    # Cost against length, from benchmarks/scaling.py.
    "scaling": [
        ("fixed", _key("goal"), "s"),
        *_TOKENS,
        ("rel_l2", _key("rel_l2"), "error"),
        ("S2O ms", _key("s2o_ms"), "ms"),
        ("cuDNN ms", _key("cudnn_ms"), "ms"),
        ("FlashAttention-2 ms", _key("flash2_ms"), "ms"),
        ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
    ],
    # A paged cache against the same keys in one array, from benchmarks/serving.py.
    "pages": [
        ("call", _key("call"), "s"),
        ("queries", _key("seqlen_q"), ",d"),
        ("keys", _key("seqlen_k"), ",d"),
        ("tau", _key("tau"), ".3g"),
        ("page size", _key("page_size"), "d"),
        ("paged ms", _key("s2o_ms"), "ms"),
        ("one array ms", _key("plain_ms"), "ms"),
        ("ratio", _key("x_plain"), ".2f"),
        ("gathered first ms", _key("gather_ms"), "ms"),
    ],
    # How long a call keeps the host, from benchmarks/host.py.
    "host": [
        ("call", _key("call"), "s"),
        ("tokens", _key("length"), ",d"),
        ("host µs", _key("host_us"), ".0f"),
        ("more than on CuPy arrays", _key("more_us"), "+.0f"),
    ],
    # Several GPUs against one, from benchmarks/many_gpus.py.
    "gpus": [
        *_TOKENS,
        ("GPUs", _key("ranks"), "d"),
        ("one GPU ms", _key("one_ms"), "ms"),
        ("ms", _key("many_ms"), "ms"),
        ("times as fast", _key("speedup"), ".2f"),
        ("keys exchanged ms", _key("gather_ms"), "ms"),
        ("rel_l2 to one GPU", _key("rel_l2"), "error"),
    ],
    # NSA's forward, from benchmarks/nsa.py.
    "nsa": [
        ("tokens", _key("length"), ",d"),
        ("query heads of a KV head", _key("group"), "d"),
        ("NSA ms", _key("ms"), "ms"),
        ("cuDNN ms", _key("cudnn_ms"), "ms"),
        ("times as fast", _key("speedup"), ".2f"),
        ("NSA ms, queued", _key("queued_ms"), "ms"),
        ("cuDNN ms, queued", _key("cudnn_queued_ms"), "ms"),
        ("times as fast", _key("queued_speedup"), ".2f"),
    ],
    "ordering": [
        *_TOKENS,
        ("ordering ms", _key("ordering_ms"), "ms"),
        ("tail's sums ms", _key("tail_ms"), "ms"),
        ("of the call", _ratio("ordering_ms", "s2o_ms"), ".0%"),
        ("of cuDNN's time", _ratio("ordering_ms", "cudnn_ms"), ".2%"),
    ],
}
# Shown where rows differ in them, else said once below the table.
_CONDITIONS: list[Column] = [
    ("input", _key("input"), "s"), ("from token", _key("offset"), ",d"), ("layers", _key("layers"), "s"),
    ("query heads", _key("heads"), "d"), ("KV heads", _key("kv_heads"), "d"), ("head_dim", _key("head_dim"), "d")
]  # fmt: skip


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(_cell(x, form) for x in value)
    if form == "ms":
        return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
    return f"{value:.2g}" if form == "error" else format(value, form)


def _said(result: dict[str, Any], fixed: list[Column]) -> str:
    """What every figure of the table was measured with."""
    row, settings = result["rows"][0], result.get("settings", {})
    parts = [str(result["device"]), settings.get("dtype", ""), "causal"]
    parts += [f"{heading} {_cell(value(row), form)}" for heading, value, form in fixed if value(row) is not None]
    order = ("segment", "rank", "unit", "window")
    parts += [f"{name} {settings[name]}" for name in order if settings.get(name) is not None]
    parts += [f"{name} {_version(result[name])}" for name in ("torch", "cudnn", "cupy") if result.get(name)]
    # Folders of the machine that measured say nothing to a reader.
    words = (Path(word).name if word.startswith("/") else word for word in shlex.split(result["command"]))
    parts += [f"commit {result['commit'][:12]}", result["date"], f"`{shlex.join(words)}`", result.get("note", "")]
    return ", ".join(filter(None, parts))


def _version(version: Any) -> str:
    """cuDNN's 91900 as 9.19.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if isinstance(version, int) else str(version)


def _with_losses(rows: list[Row], results: Path) -> tuple[list[Row], str]:
    """Rows of calls with the losses of models in model_loss.json that attended so, by order, tau and length, and where
    these come from."""
    path = results / "model_loss.json"
    if not path.exists():
        return rows, ""
    measured = json.loads(path.read_text(encoding="utf-8"))
    same = lambda row: (row["length"], row.get("order"), row.get("tau"), row.get("tau_falls"))  # noqa: E731
    losses = {(row["model"], same(row)): row["loss_difference"] for row in measured["rows"] if "order" in row}
    models = {model for model, _ in losses}
    found = [row | {f"loss_of_{model}": losses.get((model, same(row))) for model in models} for row in rows]
    return found, f"; losses: {_said(measured, [])}"


def _side_by_side(rows: list[Row]) -> list[Row]:
    """One row for the sparse rows of all models that attend alike, whose figures are then `..._of_<model>`."""
    found: dict[Any, Row] = {}
    for row in rows:
        if "config" in row:
            alike = found.setdefault((row["length"], _kind(row)), {key: row[key] for key in _ALIKE})
            alike.update({f"{key}_of_{row['model']}": value for key, value in row.items()})
    return list(found.values())


_ALIKE = ("length", "attention", "config")


def table(name: str, view: str = "time", results: Path = RESULTS) -> str:
    """The table of one file in one view, with a line below that says where it comes from."""
    path = results / f"{name}.json"
    if not path.exists():
        return MISSING
    result = json.loads(path.read_text(encoding="utf-8"))
    rows: list[Row] = result["rows"]
    rows, more = _with_losses(rows, results) if view == "cost" else (rows, "")
    models = list(dict.fromkeys(row.get("model") for row in rows))
    rows = sorted(rows, key=lambda row: (models.index(row.get("model")), row["length"] if row.get("model") else 0))
    rows = _side_by_side(rows) if view == "models" else rows
    rows = [row for row in rows if row["task"] == "all"] if view == "answers" else rows
    varied = [c for c in _CONDITIONS if len({c[1](row) for row in rows}) > 1]
    columns = [c for c in (*varied, *VIEWS[view]) if any(c[1](row) is not None for row in rows)]
    lines = ["| " + " | ".join(heading for heading, _, _ in columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(_cell(value(row), form) for _, value, form in columns) + " |" for row in rows]
    fixed = [c for c in _CONDITIONS if c not in varied]
    return "\n".join([*lines, "", f"<sub>{_said(result, fixed)}{more}</sub>"])


def render(text: str, results: Path = RESULTS) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda m: f"{m['begin']}{table(m['name'], m['view'] or 'time', results)}\n{m['end']}", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def stale() -> list[Path]:
    """Pages whose tables differ from the results."""
    return [page for page in pages() if render(text := page.read_text(encoding="utf-8")) != text]


def main() -> int:
    old = stale()
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(bool(old) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
