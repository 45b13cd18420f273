"""Write the tables and pictures of measured figures in README.md and docs from benchmarks/results/*.json.

    python docs/figures.py            rewrite every table, and draw the pictures that are out of date (matplotlib)
    python docs/figures.py --check    exit with 1 if a table or a picture is out of date

A page names a table by a pair of comments; what stands between them is replaced:

    <!-- figures:NAME VIEW KEY=VALUE -->
    <!-- /figures -->

NAME is a figure of benchmarks/_published.py, whose file is benchmarks/results/NAME.json, VIEW one of VIEWS below
("time" where it is left out) or "source", the line below a table alone. KEY=VALUE, as often as needed, keeps the rows
of which that is true. Settings in which no two rows differ are said once, below the table. docs/pictures.py draws.
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
sys.path.insert(0, str(ROOT / "benchmarks"))
import _digest  # noqa: E402
import _published  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MOST_COLUMNS = 7  # a wider table is cut off on a page

_MARKED = re.compile(
    r"(?P<begin><!-- figures:(?P<name>[\w-]+)(?: +(?P<view>\w+))?(?P<only>(?: +\w+=\S+)*) -->\n)"
    r"(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any], str]  # heading, value, format


def _key(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _kind(row: Row) -> Any:
    """Of rows with whole configurations: S2O's, which names its order, another method's, or the name of a dense one."""
    if "config" not in row:
        return row.get("attention")
    settings = [part for part in (row["config"],) if part != "default" or row["attention"] != "s2o"]
    if row["attention"] == "s2o" and row.get("rank") and "rank=" not in row["config"]:
        settings.insert(0, f"rank={row['rank']}")
    return ", ".join([row["attention"].replace("s2o", "S2O"), *settings])


def _ratio(above: str, below: str) -> Callable[[Row], Any]:
    return lambda row: row[above] / row[below] if row.get(above) is not None and row.get(below) else None


# What a row was measured with. Shown where rows differ in it, else said once below the table.
_WHERE: list[Column] = [
    ("task", _key("task"), "s"),
    ("model", _key("model"), "s"),
    ("input", _key("input"), "s"),
    ("from token", _key("offset"), ",d"),
    ("layers", _key("layers"), "s"),
    ("query heads", _key("heads"), "d"),
    ("KV heads", _key("kv_heads"), "d"),
    ("head_dim", _key("head_dim"), "d"),
    ("GPUs", _key("ranks"), "d"),
    ("fixed", _key("goal"), "s"),
    ("tokens", _key("length"), ",d"),
]
_RANK: Column = ("rank", _key("rank"), "s")
_TAU: Column = ("tau", _key("tau"), ".3g")
_DENSITY: Column = ("density", _key("density"), ".3f")
_ORDER = [_RANK, _TAU, _DENSITY]
_ATTENTION: Column = ("attention", _kind, "s")
# VIEW: what else a row was measured with, treated as _WHERE is, and its figures.
VIEWS: dict[str, tuple[list[Column], list[Column]]] = {
    # The whole call beside dense attention.
    "time": (
        _ORDER,
        [
            ("S2O ms", _key("s2o_ms"), "ms"),
            ("cuDNN ms", _key("cudnn_ms"), "ms"),
            ("FlashAttention-2 ms", _key("flash2_ms"), "ms"),
            ("FlashAttention-3 ms", _key("flash3_ms"), "ms"),
            ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
            ("rel_l2", _key("rel_l2"), "error"),
        ],
    ),
    # The same without the density, and beside it what models lose with that order and tau at that length.
    "cost": (
        [_RANK, _TAU],
        [
            ("S2O ms", _key("s2o_ms"), "ms"),
            ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
            ("A's nats to dense", _key("loss_of_A"), "+.4f"),
            ("B's nats to dense", _key("loss_of_B"), "+.4f"),
            ("C's", _key("loss_of_C"), "+.4f"),
        ],
    ),
    "memory": ([_RANK, _TAU], [("GiB beside inputs and output", _key("extra_gib"), ".2f")]),
    # Its parts,
    "parts": (
        [_RANK, _TAU],
        [
            ("ordering ms", _key("ordering_ms"), "ms"),
            ("pass 1 ms", _key("pass1_ms"), "ms"),
            ("pass 2 ms", _key("pass2_ms"), "ms"),
            ("pass 2 TFLOP/s", _key("pass2_tflops"), ".0f"),
            ("pass 2 / cuDNN", _ratio("pass2_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    # the rate of pass 2 on the pairs it computes,
    "rates": (
        _ORDER,
        [
            ("pass 2 ms", _key("pass2_ms"), "ms"),
            ("pass 2 TFLOP/s", _key("pass2_tflops"), ".0f"),
            ("cuDNN TFLOP/s", _key("cudnn_tflops"), ".0f"),
            ("pass 2 / cuDNN", _ratio("pass2_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    # and that of pass 1 where it does all.
    "dense": (
        [_TAU],
        [
            ("pass 1 ms", _key("pass1_ms"), "ms"),
            ("cuDNN TFLOP/s", _key("cudnn_tflops"), ".0f"),
            ("pass 1 / cuDNN", _ratio("pass1_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    "ordering": (
        [_RANK, _TAU],
        [
            ("ordering ms", _key("ordering_ms"), "ms"),
            ("of the call", _ratio("ordering_ms", "s2o_ms"), ".0%"),
            ("of cuDNN's time", _ratio("ordering_ms", "cudnn_ms"), ".2%"),
        ],
    ),
    # Kinds of order, in files whose rows name them.
    "error": (
        [("segment", _key("segment"), "d"), *_ORDER],
        [
            ("rel_l2", _key("rel_l2"), "error"),
            ("S2O ms", _key("s2o_ms"), "ms"),
            ("ordering ms", _key("ordering_ms"), "ms"),
        ],
    ),
    # Models from end to end, any configuration, from benchmarks/model.py: what is lost and saved,
    "loss": (
        [_ATTENTION, _DENSITY],
        [
            ("nats more than dense", _key("loss_difference"), "+.4f"),
            ("±", _key("loss_difference_sem"), ".4f"),
            ("of dense attention's time", _key("x_attention"), ".3f"),
        ],
    ),
    # of what,
    "whole": (
        [_ATTENTION],
        [
            ("nats a token", _key("loss"), ".4f"),
            ("likeliest token came", _key("accuracy"), ".2%"),
            ("prefill ms", _key("prefill_ms"), "ms"),
            ("of it attention", _key("attention_ms"), "ms"),
        ],
    ),
    # models side by side (`_side_by_side`),
    "models": (
        [_ATTENTION],
        [
            (heading.format(model), _key(f"{key}_of_{model}"), form)
            for model in (*"ABC", "small", "small_1")
            for heading, key, form in (
                ("{}: nats more than dense", "loss_difference", "+.4f"),
                ("{}: where text is copied", "copies_loss_difference", "+.4f"),
                ("{}: of dense attention's time", "x_attention", ".3f"),
            )
        ],
    ),
    # where in the text,
    "positions": (
        [_ATTENTION],
        [("nats more than dense, by eighths of the text", _key("loss_difference_by_position"), "+.4f")],
    ),
    # at tokens that the text copies from far away,
    "copies": (
        [_ATTENTION],
        [
            ("copied tokens", _key("copies"), ".2%"),
            ("their nats", _key("copies_loss"), ".4f"),
            ("more than dense", _key("copies_loss_difference"), "+.4f"),
            ("likeliest token came", _key("copies_accuracy"), ".2%"),
        ],
    ),
    # and in which layers and rows.
    "layers": (
        [_ATTENTION],
        [
            ("rel_l2 by layer", _key("rel_l2_by_layer"), "error"),
            ("99 % of rows below", _key("row_p99_by_layer"), "error"),
            ("rows above 0.5", _key("rows_above_half_by_layer"), ".2%"),
        ],
    ),
    # Where an error was asked for.
    "asked": (
        [_ATTENTION],
        [
            ("rel_l2 by layer", _key("rel_l2_by_layer"), "error"),
            ("density by layer", _key("density_by_layer"), "error"),
        ],
    ),
    # Questions to a pretrained model about a long text, from benchmarks/tasks.py.
    "tasks": (
        [_ATTENTION, _DENSITY],
        [
            ("right answers", _key("right"), ".1%"),
            ("right tokens", _key("right_tokens"), ".1%"),
            ("answered as by dense", _key("as_dense"), ".1%"),
        ],
    ),
    # Answers of the retrieval model, from benchmarks/tasks.py --retrieval.
    "answers": (
        [_ATTENTION, _DENSITY],
        [
            ("right answers", _key("right"), ".1%"),
            ("right tokens", _key("right_tokens"), ".1%"),
            ("over 32,768 tokens away", _key("right_beyond"), ".1%"),
            ("of dense attention's time", _key("x_attention"), ".3f"),
        ],
    ),
    # Calls that wait for each other on the GPU, and how long a call keeps the host busy.
    "queued": (
        [_RANK, _TAU],
        [
            ("S2O ms, queued", _key("s2o_queued_ms"), "ms"),
            ("cuDNN ms, queued", _key("cudnn_queued_ms"), "ms"),
            ("S2O / cuDNN", _key("x_cudnn_queued"), ".3f"),
            ("host µs, PyTorch", _key("host_us"), ".0f"),
            ("host µs, CuPy", _key("host_us_cupy"), ".0f"),
        ],
    ),
    # Cost against length, from benchmarks/scaling.py.
    "scaling": (
        _ORDER,
        [
            ("rel_l2", _key("rel_l2"), "error"),
            ("S2O ms", _key("s2o_ms"), "ms"),
            ("S2O / cuDNN", _ratio("s2o_ms", "cudnn_ms"), ".3f"),
        ],
    ),
    # A paged cache against the same keys in one array, from benchmarks/serving.py.
    "pages": (
        [
            ("call", _key("call"), "s"),
            ("keys", _key("seqlen_k"), ",d"),
            _TAU,
            ("page size", _key("page_size"), "d"),
        ],
        [
            ("paged ms", _key("s2o_ms"), "ms"),
            ("one array ms", _key("plain_ms"), "ms"),
            ("ratio", _key("x_plain"), ".2f"),
            ("gathered first ms", _key("gather_ms"), "ms"),
        ],
    ),
    # A prompt in chunks, sequences packed one behind the other, and these over a paged cache.
    "chunks": (
        _ORDER,
        [
            ("rel_l2", _key("rel_l2"), "error"),
            ("one call's", _key("plain_rel_l2"), "error"),
            ("chunks ms", _key("s2o_ms"), "ms"),
            ("one call ms", _key("plain_ms"), "ms"),
            ("cuDNN, one call, ms", _key("cudnn_ms"), "ms"),
        ],
    ),
    "packed": (
        _ORDER,
        [
            ("rel_l2", _key("rel_l2"), "error"),
            ("packed ms", _key("s2o_ms"), "ms"),
            ("one by one ms", _key("plain_ms"), "ms"),
            ("cuDNN, one by one, ms", _key("cudnn_ms"), "ms"),
            ("PyTorch's varlen_attn ms", _key("varlen_ms"), "ms"),
        ],
    ),
    # Servers, from benchmarks/server.py: of each length by the server's own attention and by S2O (`_servers`).
    "servers": (
        [],
        [
            ("seconds of", _key("said"), "s"),
            ("its own, s", _key("own"), ".3f"),
            ("S2O, s", _key("s2o"), ".3f"),
            ("its own / S2O", _ratio("own", "s2o"), ".2f"),
            ("S2O's density", _key("density"), ".3f"),
        ],
    ),
    "served": (
        [_ATTENTION],
        [
            ("questions", _key("answers"), ",d"),
            ("right answers", _key("right"), ".1%"),
            ("right tokens", _key("right_tokens"), ".2%"),
        ],
    ),
    # A video's size, from benchmarks/video.py.
    "video": (
        [("method", _key("method"), "s")],
        [
            ("error asked", _key("asked"), "g"),
            ("rel_l2", _key("rel_l2"), "error"),
            ("density", _key("density"), ".4f"),
            ("ms", _key("ms"), "ms"),
            ("of cuDNN's time", _key("x_cudnn"), ".3f"),
        ],
    ),
    "ragged": (
        [("batch", _key("batch"), "s"), ("tokens in all", _key("tokens"), ",d"), ("page size", _key("page_size"), "d")],
        [
            ("packed ms", _key("packed_ms"), "ms"),
            ("paged ms", _key("paged_ms"), "ms"),
            ("paged / packed", _key("x_packed"), ".2f"),
        ],
    ),
    # Attention by lists of keys, from benchmarks/lists.py.
    "lists": (
        [("lists", _key("kind"), "s"), _DENSITY],
        [
            ("by lists ms", _key("lists_ms"), "ms"),
            ("S2O's own pass 2 ms", _key("pass2_ms"), "ms"),
            ("rate / cuDNN's", _key("efficiency"), ".2f"),
        ],
    ),
    # How long a call keeps the host, from benchmarks/host.py.
    "host": (
        [("call", _key("call"), "s")],
        [("host µs", _key("host_us"), ".0f"), ("more than on CuPy arrays", _key("more_us"), "+.0f")],
    ),
    # Several GPUs against one, from benchmarks/many_gpus.py.
    "gpus": (
        [*_ORDER, ("rel_l2 to one GPU", _key("rel_l2"), "error")],
        [
            ("one GPU ms", _key("one_ms"), "ms"),
            ("ms", _key("many_ms"), "ms"),
            ("times as fast", _key("speedup"), ".2f"),
            ("keys exchanged ms", _key("gather_ms"), "ms"),
        ],
    ),
    # NSA's forward, from benchmarks/nsa.py: single calls, and calls that wait for each other on the GPU.
    "nsa": (
        [("query heads of a KV head", _key("group"), "d")],
        [
            ("NSA ms", _key("ms"), "ms"),
            ("cuDNN ms", _key("cudnn_ms"), "ms"),
            ("times as fast", _key("speedup"), ".2f"),
        ],
    ),
    "nsa_queued": (
        [("query heads of a KV head", _key("group"), "d")],
        [
            ("NSA ms, queued", _key("queued_ms"), "ms"),
            ("cuDNN ms, queued", _key("cudnn_queued_ms"), "ms"),
            ("times as fast", _key("queued_speedup"), ".2f"),
        ],
    ),
}


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(_cell(x, form) for x in value)
    if form == "ms":
        return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
    return f"{value:.2g}" if form == "error" else format(value, form)


def _said(name: str, result: dict[str, Any], fixed: list[Column], row: Row) -> str:
    """What every figure of the table was measured with."""
    settings = result.get("settings", {})
    parts = [str(result["device"]), settings.get("dtype", ""), "causal"]
    told = {heading: _cell(value(row), form) for heading, value, form in fixed if value(row) is not None}
    parts += [f"{heading} {cell}" for heading, cell in told.items()]
    order = ("segment", "rank", "unit", "window", "tail")
    parts += [f"{name} {settings[name]}" for name in order if settings.get(name) is not None and name not in told]
    parts += [f"{name} {_version(result[name])}" for name in ("torch", "cudnn", "cupy") if result.get(name)]
    # Folders of the machine that measured say nothing to a reader.
    words = (Path(word).name if word.startswith("/") else word for word in shlex.split(result["command"]))
    parts += [f"commit {result['commit'][:12]}", result["date"], f"`{shlex.join(words)}`", result.get("note", "")]
    parts.append(_digest.since(result))
    parts.append("its inputs are not in the repository" if name in _published.ELSEWHERE else "")
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
    return found, f"; losses: {_said('model_loss', measured, [], {})}"


def _side_by_side(rows: list[Row]) -> list[Row]:
    """One row for the sparse rows of all models that attend alike, whose figures are then `..._of_<model>`."""
    found: dict[Any, Row] = {}
    for row in rows:
        if "config" in row:
            same = {key: row[key] for key in ("length", "attention", "config", "rank") if key in row}
            alike = found.setdefault((row["length"], _kind(row)), same)
            alike.update({f"{key}_of_{row['model']}": value for key, value in row.items()})
    return list(found.values())


SERVED = {
    "one": "the first token of a prompt", "many": "the first tokens of {} prompts at once",
    "decode": "64 further tokens",
}  # fmt: skip


def _servers(rows: list[Row]) -> list[Row]:
    """One row for both attentions of a server: ``own`` and ``s2o`` are seconds."""
    found: dict[Any, Row] = {}
    for row in rows:
        said = SERVED[row["part"]].format(row["prompts"])
        same = found.setdefault((row["part"], row["length"]), {"said": said, "length": row["length"]})
        same[row["attention"]] = row["seconds"]
        if row["part"] == "one" and row.get("density"):
            same["density"] = row["density"]
    return list(found.values())


def table(name: str, view: str = "time", only: str = "", results: Path = RESULTS) -> str:
    """The table of one file in one view, with a line below that says where it comes from."""
    path = results / f"{name}.json"
    if name in _published.FIGURES and not path.exists():
        return f"Not measured yet; `make figures ONLY={name}` does that."
    result = json.loads(path.read_text(encoding="utf-8"))
    wanted = [pair.split("=", 1) for pair in only.split()]
    rows: list[Row] = [row for row in result["rows"] if all(str(row.get(key)) == value for key, value in wanted)]
    if not rows:
        raise ValueError(f"{name}.json has no row with {only}")
    if view == "source":
        return f"<sub>{_said(name, result, _same(rows, [*_WHERE, _RANK]), rows[0])}</sub>"
    rows, more = _with_losses(rows, results) if view == "cost" else (rows, "")
    models = list(dict.fromkeys(row.get("model") for row in rows))
    rows = sorted(rows, key=lambda row: (models.index(row.get("model")), row["length"] if row.get("model") else 0))
    rows = _side_by_side(rows) if view == "models" else _servers(rows) if view == "servers" else rows
    rows = [row for row in rows if row["task"] == "all"] if view == "answers" else rows
    settings, figures = VIEWS[view]
    fixed = _same(rows, [*_WHERE, *settings])
    columns = [c for c in (*_WHERE, *settings) if c not in fixed]
    columns += [c for c in figures if any(c[1](row) for row in rows)]
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"{name} {view} has {len(columns)} columns, of which a page shows {MOST_COLUMNS}")
    lines = ["| " + " | ".join(heading for heading, _, _ in columns) + " |"]
    lines += ["|" + "".join(" :--- |" if form == "s" else " ---: |" for _, _, form in columns)]
    lines += ["| " + " | ".join(_cell(value(row), form) for _, value, form in columns) + " |" for row in rows]
    return "\n".join([*lines, "", f"<sub>{_said(name, result, fixed, rows[0])}{more}</sub>"])


def _same(rows: list[Row], columns: list[Column]) -> list[Column]:
    """Those in which no two rows differ, as a page shows them."""
    return [(name, value, form) for name, value, form in columns if len({_cell(value(row), form) for row in rows}) == 1]


def render(text: str, results: Path = RESULTS) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(
        lambda m: f"{m['begin']}{table(m['name'], m['view'] or 'time', m['only'], results)}\n{m['end']}", text
    )


def pages() -> list[Path]:
    folders = ROOT / "docs", ROOT / "docs" / "figures"
    return [ROOT / "README.md", *(page for folder in folders for page in sorted(folder.glob("*.md")))]


def stale() -> list[Path]:
    """Pages whose tables differ from the results."""
    return [page for page in pages() if render(text := page.read_text(encoding="utf-8")) != text]


def main() -> int:
    import pictures

    check = "--check" in sys.argv
    old = stale() + pictures.stale()
    for path in old:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'written'}")
        if not check and path.suffix == ".md":
            path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
        elif not check:
            pictures.draw(path)
    return int(bool(old) and check)


if __name__ == "__main__":
    sys.exit(main())
