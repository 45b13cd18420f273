"""Pages of the documentation site, made of README.md, docs/*.md and docstrings. mkdocs calls this as a hook.

The pages are written to be read where the repository is. For the site long sections become pages of their own, links
between pages follow them, and links to other files of the repository get the address that setup.cfg has.
"""

from __future__ import annotations

import configparser
import json
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BESIDE_DOCS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/tour.ipynb": "tour.md",
}


class Guide(NamedTuple):
    """A page of the site that stands as sections in a page of the repository."""

    source: str
    title: str
    sections: tuple[str, ...]


GUIDES = {
    "guides/setting.md": Guide("docs/reference.md", "Choosing a setting", ("Choosing a setting",)),
    "guides/models.md": Guide("docs/integrations.md", "Hugging Face models", ("Hugging Face transformers",)),
    "guides/batches.md": Guide(
        "docs/integrations.md", "Packed and paged batches", ("Packed sequences", "Prefill in chunks", "Paged caches")
    ),
    "guides/jax.md": Guide("docs/integrations.md", "JAX", ("JAX",)),
    "figures.md": Guide("README.md", "Figures", ("Figures",)),
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
            *(f"{PACKAGE}.{name}" for name in ("tune", "tools.tune.TuneResult")),
            *(f"{PACKAGE}.{name}" for name in ("error_per_head", "tools.sampled.ErrorEstimate", "attention_within")),
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
            f"{PACKAGE}.{name}"
            for name in (
                "sparse_attention", "sparse_attention_paged", "sparse_attention_varlen", "select", "MeanPoolingConfig",
                "PBSConfig", "SpargeConfig", "tune_sparge",
                "tools.tune_sparge.SpargeTuning", "XAttentionConfig", "FlexPrefillConfig", "VerticalSlashConfig",
                "AShapeConfig", "BLASSTConfig", "own.method.Method", "compare", "tools.compare.Comparison",
                "tools.compare.Compared",
            )
        ],
    ),
    "api/nsa.md": (
        "NSA",
        [
            f"{PACKAGE}.{name}"
            for name in (
                "nsa_attention", "NSAConfig", "nsa_compress", "nsa_select", "selected_attention",
                "selected_attention_backward", "window_attention", "integrations.nsa",
            )
        ],
    ),
    "api/tools.md": (
        "Inputs, metrics, diff",
        [f"{PACKAGE}.{name}" for name in ("merge_states", "diff", "inputs", "metrics")],
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
        [f"{PACKAGE}.reference.{name}" for name in ("dense", "s2o", "lists", "nsa", "nsa_backward")],
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


def _sections(text: str) -> dict[str, str]:
    """A page by its headings of the second level, in order; what stands before the first is ""."""
    found = {"": ""}
    name = ""
    for part in _FENCED.split(text):
        pieces = [part] if part.startswith("```") else re.split(r"(?=^## )", part, flags=re.MULTILINE)
        for piece in pieces:
            if piece.startswith("## "):
                name = piece[3:].split("\n", 1)[0]
                found[name] = ""
            found[name] += piece
    return found


def _notebook(path: Path) -> str:
    """Cells of a notebook with the outputs that it was saved with."""
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
    """Every page of the site by its place, as Markdown: those of the repository, guides and API."""
    sources = _sources()
    texts: dict[str, tuple[str, str]] = {}  # place -> (source, text)
    moved: dict[tuple[str, str], str] = {}  # (source, anchor) -> place of its guide
    for source, uri in sources.items():
        path = ROOT / source
        text = _notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        sections = _sections(text)
        for place, guide in GUIDES.items():
            if guide.source != source:
                continue
            for name in guide.sections:
                if name not in sections:
                    raise ValueError(f"docs/site_pages.py: {source} has no section {name!r}; it has {list(sections)}")
            parts = [sections[name] for name in guide.sections]
            moved |= {(source, slug(heading)): place for part in parts for heading in headings(part)}
            if len(parts) == 1:  # its headings move up by a level
                body = _outside_code(parts[0].split("\n", 1)[1], lambda x: re.sub(r"^#(?=#+ )", "", x, flags=re.M))
            else:
                body = "\n" + "".join(parts)
            texts[place] = source, f"# {guide.title}\n{body}"
            for name in guide.sections:
                anchor = f"#{slug(name)}" if len(parts) > 1 else ""
                here = posixpath.relpath(place, posixpath.dirname(uri))
                sections[name] = f"## {name}\n\nOn a page of its own: [{guide.title}](site:{here}{anchor}).\n\n"
        texts[uri] = source, "".join(sections.values())
    alone = {place for place, guide in GUIDES.items() if len(guide.sections) == 1}

    def rewritten(uri: str, source: str, text: str) -> str:
        def target(match: re.Match) -> str:
            link = match[1]
            if link.startswith("site:"):
                return link[5:]
            if re.match(r"\w+:", link):
                return link
            path, _, anchor = link.partition("#")
            file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
            place = moved.get((file, anchor)) or sources.get(file)
            if place is None and file.startswith("docs/"):  # a picture
                place = file.removeprefix("docs/")
            if place is None:
                return f"{repository()}/{'tree' if (ROOT / file).is_dir() else 'blob'}/main/{file}"
            if place in alone and anchor == slug(GUIDES[place].sections[0]):
                anchor = ""  # the page itself
            elsewhere = posixpath.relpath(place, posixpath.dirname(uri) or ".") if place != uri or not anchor else ""
            return elsewhere + (f"#{anchor}" if anchor else "")

        return _outside_code(text, lambda part: _LIST_UNDER_TEXT.sub(r"\1\n\n", _LINK.sub(target, part)))

    made = {uri: rewritten(uri, source, text) for uri, (source, text) in texts.items()}
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
