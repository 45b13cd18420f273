"""Write the tables and pictures of measured figures in README.md and docs from benchmarks/results/*.json.

    python docs/figures.py            rewrite every table, and draw the pictures that are out of date (matplotlib)
    python docs/figures.py --check    exit with 1 if a table or a picture is out of date

A page names a table by a pair of comments; what stands between them is replaced:

    <!-- figures:NAME VIEW KEY=VALUE -->
    <!-- /figures -->

NAME is a figure of benchmarks/_published.py, whose file is benchmarks/results/NAME.json, VIEW one of docs/views.py
("time" where it is left out) or "source", the line below a table alone. KEY=VALUE, as often as needed, keeps the rows
of which that is true. Settings in which no two rows differ are said once, below the table. docs/pictures.py draws.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "docs"))  # behind: benchmarks has a figures.py, too
import _digest  # noqa: E402
import _published  # noqa: E402
from views import RANK, VIEWS, WHERE, Column, Row, kind_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MOST_COLUMNS = 7  # a wider table is cut off on a page

_MARKED = re.compile(
    r"(?P<begin><!-- figures:(?P<name>[\w-]+)(?: +(?P<view>\w+))?(?P<only>(?: +\w+=\S+)*) -->\n)"
    r"(?P<body>.*?)(?P<end><!-- /figures -->)",
    re.DOTALL,
)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(_cell(x, form) for x in value)
    if form == "ms":
        return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
    return f"{value:.2g}" if form == "error" else format(value, form)


NOT_CAUSAL = ("video",)


def _said(name: str, result: dict[str, Any], fixed: list[Column], row: Row) -> str:
    """What every figure of the table was measured with."""
    settings = result.get("settings", {})
    parts = [str(result["device"]), settings.get("dtype", ""), "not causal" if name in NOT_CAUSAL else "causal"]
    told = {heading: _cell(value(row), form) for heading, value, form in fixed if value(row) is not None}
    parts += [f"{heading} {cell}" for heading, cell in told.items()]
    order = ("segment", "rank", "unit", "clusters", "window", "tail")
    parts += [f"{name} {settings[name]}" for name in order if settings.get(name) is not None and name not in told]
    parts += [f"{name} {_version(result[name])}" for name in ("torch", "cudnn", "cupy") if result.get(name)]
    # Folders of the machine that measured say nothing to a reader.
    words = (Path(word).name if word.startswith("/") else word for word in shlex.split(result["command"]))
    parts += [f"commit {result['commit'][:12]}", result["date"], f"`{shlex.join(words)}`", result.get("note", "")]
    parts.append(_digest.since(result))
    return ", ".join(filter(None, parts))


def _version(version: Any) -> str:
    """cuDNN's 91900 as 9.19.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if isinstance(version, int) else str(version)


def _side_by_side(rows: list[Row]) -> list[Row]:
    """One row for the sparse rows of all models that attend alike, whose figures are then `..._of_<model>`."""
    found: dict[Any, Row] = {}
    for row in rows:
        if "config" in row:
            same = {key: row[key] for key in ("length", "attention", "config", "rank") if key in row}
            alike = found.setdefault((row["length"], kind_of(row)), same)
            alike.update({f"{key}_of_{row['model']}": value for key, value in row.items()})
    return list(found.values())


SERVED = {
    "one": "the first token of a prompt", "many": "the first tokens of {} prompts at once",
    "decode": "64 further tokens", "cached": "the first token, all but 4,096 tokens cached",
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
        return f"<sub>{_said(name, result, _same(rows, [*WHERE, RANK]), rows[0])}</sub>"
    models = list(dict.fromkeys(row.get("model") for row in rows))
    rows = sorted(rows, key=lambda row: (models.index(row.get("model")), row["length"] if row.get("model") else 0))
    rows = _side_by_side(rows) if view == "models" else _servers(rows) if view == "servers" else rows
    rows = [row for row in rows if row["task"] == "all"] if view == "answers" else rows
    settings, figures = VIEWS[view]
    fixed = _same(rows, [*WHERE, *settings])
    columns = [c for c in (*WHERE, *settings) if c not in fixed]
    columns += [c for c in figures if any(c[1](row) for row in rows)]
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"{name} {view} has {len(columns)} columns, of which a page shows {MOST_COLUMNS}")
    lines = ["| " + " | ".join(heading for heading, _, _ in columns) + " |"]
    lines += ["|" + "".join(" :--- |" if form == "s" else " ---: |" for _, _, form in columns)]
    lines += ["| " + " | ".join(_cell(value(row), form) for _, value, form in columns) + " |" for row in rows]
    return "\n".join([*lines, "", f"<sub>{_said(name, result, fixed, rows[0])}</sub>"])


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
