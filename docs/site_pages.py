"""Pages of the documentation site, made of README.md, docs/*.md and docstrings. mkdocs calls this as a hook.

The pages are written to be read where the repository is. For the site links to other files of the repository get the
address that setup.cfg has, and wide tables may break lines.
"""

from __future__ import annotations

import configparser
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BESIDE_DOCS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/tour.ipynb": "tour.md",
}


PACKAGE = "s2o_cupy"
INTEGRATIONS = f"{PACKAGE}.integrations"
# Title, and the names whose docstrings the page shows; a module stands for all that its __all__ names.
API = {
    "api/attention.md": (
        "Attention",
        [f"{PACKAGE}.{name}" for name in ("s2o_attention", "s2o_attention_varlen", "s2o_attention_paged")],
    ),
    "api/configuration.md": (
        "Configuration and statistics",
        [f"{PACKAGE}.{name}" for name in ("S2OConfig", "S2OStats", "S2OError", "clear_cache")],
    ),
    "api/tuning.md": (
        "Tuning",
        [
            f"{INTEGRATIONS}.model_tools",
            *(f"{PACKAGE}.tools.tune_layers.{name}" for name in ("TunedLayers", "tune_layers")),
            *(f"{PACKAGE}.tools.{name}" for name in ("loss_search.Trial", "must_hold.Part", "must_hold.Bound")),
            f"{PACKAGE}.tools.measured_method.MeasuredMethod",
            *(f"{INTEGRATIONS}.model_report.{name}" for name in ("ModelReport", "LayerReport")),
            *(f"{PACKAGE}.{name}" for name in ("tools.tune", "tools.tuning.TuneResult")),
            *(f"{PACKAGE}.tools.{name}" for name in ("error_per_head", "sampled.ErrorEstimate", "attention_within")),
        ],
    ),
    "api/schedules.md": (
        "Schedules",
        [
            f"{PACKAGE}.{name}"
            for name in (
                "gather_attention", "gather_attention_paged", "gather_attention_varlen", "Schedule", "GatherStats"
            )
        ],
    ),
    "api/methods.md": (
        "Methods",
        [
            *(
                f"{PACKAGE}.methods.{name}"
                for name in (
                    "sparse_attention", "sparse_attention_paged", "sparse_attention_varlen", "select",
                    "MeanPoolingConfig", "PBSConfig", "SpargeConfig", "XAttentionConfig", "FlexPrefillConfig",
                    "VerticalSlashConfig", "AShapeConfig", "BLASSTConfig", "own.Method",
                )
            ),
            *(
                f"{PACKAGE}.tools.{name}"
                for name in (
                    "tune_sparge", "sparge_tuning.SpargeTuning", "compare", "comparing.Comparison", "comparing.Compared"
                )
            ),
        ],
    ),
    "api/nsa.md": (
        "NSA",
        [
            f"{PACKAGE}.{name}"
            for name in (
                "nsa.nsa_attention", "nsa.NSAConfig", "nsa.nsa_compress", "nsa.nsa_select", "nsa.selected_attention",
                "nsa.selected_attention_backward", "nsa.window_attention", "integrations.nsa",
            )
        ],
    ),
    "api/tools.md": (
        "Inputs, metrics, diff",
        [f"{PACKAGE}.{name}" for name in ("merge_states", "tools.diff", "tools.inputs", "tools.metrics")],
    ),
    "api/integrations.md": (
        "Integrations",
        [
            f"{INTEGRATIONS}.{name}"
            for name in ("torch", "torch_gather", "drop_in", "transformers", "diffusers", "distributed", "jax")
        ],
    ),
    "api/reference.md": (
        "NumPy reference",
        [f"{PACKAGE}.reference.{name}" for name in ("dense", "s2o", "lists", "nsa.forward", "nsa.backward")],
    ),
}

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
# GitHub lets a list begin right under a paragraph; Python-Markdown wants a line between.
_LIST_UNDER_TEXT = re.compile(r"^(?![-#|>\s]|\d+\.)(.+)\n(?=- )", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):(?=<code>)")  # as Sphinx has it in docstrings


def repository() -> str:
    """The address of the repository: its one place is setup.cfg."""
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup["metadata"]["url"].rstrip("/")


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.MULTILINE)


def _outside_code(text: str, change: Any) -> str:
    """``change`` of every part of a page that is no fenced block."""
    return "".join(part if part.startswith("```") else change(part) for part in _FENCED.split(text))


def _jupyter(path: Path) -> str:
    """Cells of a Jupyter notebook with the outputs that it was saved with."""
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            printed = "".join(output.get("text", ()) or ("" if "image/png" in data else data.get("text/plain", ())))
            if printed:
                blocks.append(f"```text\n{printed.rstrip()}\n```")
            if "image/png" in data:
                blocks.append(f"![what the cell drew](data:image/png;base64,{''.join(data['image/png']).strip()})")
    return "\n\n".join(blocks) + "\n"


def _sources() -> dict[str, str]:
    """Files of the repository that are pages of the site, and their places there."""
    beside = {source: uri for source, uri in BESIDE_DOCS.items() if (ROOT / source).exists()}
    inside = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    return beside | {source: source.removeprefix("docs/") for source in sorted(inside)}


def pages() -> dict[str, str]:
    """Every page of the site by its place, as Markdown: those of the repository and of the API."""
    sources = _sources()

    def rewritten(source: str, text: str) -> str:
        def target(match: re.Match) -> str:
            link = match[1]
            if re.match(r"\w+:", link):
                return link
            path, _, anchor = link.partition("#")
            file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
            place = sources.get(file)
            if place is None and file.startswith("docs/"):  # a picture
                place = file.removeprefix("docs/")
            if place is None:
                return f"{repository()}/{'tree' if (ROOT / file).is_dir() else 'blob'}/main/{file}"
            here = sources[source]
            elsewhere = posixpath.relpath(place, posixpath.dirname(here) or ".") if place != here or not anchor else ""
            return elsewhere + (f"#{anchor}" if anchor else "")

        return _outside_code(text, lambda part: _LIST_UNDER_TEXT.sub(r"\1\n\n", _LINK.sub(target, part)))

    made = {}
    for source, uri in sources.items():
        path = ROOT / source
        text = _jupyter(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        made[uri] = rewritten(source, text)
    for uri, (title, names) in API.items():
        made[uri] = f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in names)
    return made


# ---------------------------------------------------------------- called by mkdocs


def on_config(config: Any) -> Any:
    config["repo_url"] = repository()
    config["repo_name"] = PACKAGE
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for uri, text in pages().items():
        written = files.get_file_from_path(uri)
        if written:
            files.remove(written)
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub("", html)
