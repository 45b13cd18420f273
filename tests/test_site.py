"""The documentation site, without mkdocs: pages, navigation, links and names of the API; and files beside README.md."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import posixpath
import re
from pathlib import Path

import pytest
from in_process import finished

import s2o_cupy

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="needs a source checkout")
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site():
    found = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site):
    return site.pages()


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_page_is_in_the_navigation_once(pages):
    """All but the notebook, which is read from a link."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = settings.split("\nnav:\n", 1)[1].split("\n\n", 1)[0]
    listed = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(uri for uri in pages if not uri.startswith("notebook/"))
    assert "\nnot_in_nav: |\n  notebook/\n" in settings
    assert "](../notebook/README.md)" in pages["figures/README.md"]


def test_every_page_of_the_repository_is_on_the_site(site, pages):
    for path in (ROOT / "docs").glob("**/*.md"):
        assert path.relative_to(ROOT / "docs").as_posix() in pages
    assert set(site.BESIDE_DOCS.values()) <= pages.keys()


def test_links_lead_somewhere(site, pages):
    """To a page of the site and a heading on it, to a picture, or to a file at the repository's address."""
    anchors = {uri: {site.slug(heading) for heading in site.headings(text)} for uri, text in pages.items()}
    address = re.compile(re.escape(site.repository()) + "/(blob|tree)/main/(.*)")
    elsewhere = 0
    for uri, text in pages.items():
        for picture, link in LINK.findall(prose(text)):
            if link.startswith(site.repository()):
                match = address.fullmatch(link)
                assert match, link
                path = ROOT / match[2]
                assert path.is_dir() if match[1] == "tree" else path.is_file(), link
                elsewhere += 1
            elif not re.match(r"https?:|data:image/png", link):
                target, _, anchor = link.partition("#")
                target = posixpath.normpath(posixpath.join(posixpath.dirname(uri), target)) if target else uri
                if picture or target.endswith(".png"):
                    assert (ROOT / "docs" / target).exists(), f"{uri}: {link}"
                else:
                    assert target in pages, f"{uri}: {link}"
                    assert not anchor or anchor in anchors[target], f"{uri}: {link}"
    assert elsewhere > 20  # sources, of the pages about kernels


def test_links_are_relative_to_their_page(pages):
    assert "](batches.md#paged-caches)" in pages["interop.md"]
    assert "](../batches.md" not in pages["interop.md"] and "](../tuning.md" in pages["figures/tuning.md"]
    assert "](several_gpus.md)" in pages["index.md"]


def test_nothing_but_pages_and_pictures_is_published():
    """mkdocs copies every other file of its folder."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    left_out = settings.split("\nexclude_docs: |\n", 1)[1].split("\n", 2)[:2]
    assert [line.strip() for line in left_out] == ["*.py", "__pycache__/"]
    for path in (ROOT / "docs").glob("**/*"):
        assert path.is_dir() or path.suffix in (".md", ".png", ".py", ".css") or path.parent.name == "__pycache__", path


def test_the_tour_has_its_outputs(pages):
    assert "\n```text\nq (1, 4, 2816, 128)" in pages["tour.md"]
    assert pages["tour.md"].count("](data:image/png;base64,iVBOR") == 2


def test_a_list_under_a_paragraph_is_one(site):
    assert site._LIST_UNDER_TEXT.sub(r"\1\n\n", "text:\n- one\n  more\n- two\n") == "text:\n\n- one\n  more\n- two\n"


def test_every_public_name_is_in_the_api(site):
    listed = [name for _, names in site.API.values() for name in names]
    assert len(listed) == len(set(listed))
    rooms = {name for name in s2o_cupy.__all__ if inspect.ismodule(getattr(s2o_cupy, name))}
    expected = {f"s2o_cupy.{name}" for name in {*s2o_cupy.__all__} - rooms} - {"s2o_cupy.__version__"}
    expected |= {f"s2o_cupy.{name}.{x}" for name in rooms for x in getattr(s2o_cupy, name).__all__}
    assert expected <= set(listed)
    told = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(s2o_cupy\.integrations\.\w+)` \|", told, re.MULTILINE)) <= set(listed)
    for name in listed:
        if not name.startswith("s2o_cupy.integrations."):
            owner, _, last = name.rpartition(".")
            of_owner = hasattr(importlib.import_module(owner), last)
            assert of_owner or importlib.util.find_spec(name), name  # a module is its package's once it is imported


# ---------------------------------------------------------------- beside README.md


def test_the_address_of_the_repository_has_one_place(site):
    texts = [path for pattern in ("*", "docs/**/*", ".github/**/*", "s2o_cupy/**/*.py") for path in ROOT.glob(pattern)]
    host = re.match(r"https://[^/]+", site.repository())[0]
    holders = {
        path.name
        for path in texts
        if path.suffix in (".md", ".py", ".cff", ".yml", ".toml", ".cfg", "") and path.is_file()
        if host in path.read_text(encoding="utf-8", errors="replace")
    }
    assert holders == {"setup.cfg"}


def test_the_citation_is_of_this_version_and_of_the_readme():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {s2o_cupy.__version__}\n" in citation
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (title,) = re.findall(r"title  = \{(.*)\}", readme)
    (authors,) = re.findall(r"author = \{(.*)\}", readme)
    (number,) = re.findall(r"eprint = \{(.*)\}", readme)
    assert f'title: "{title}"' in citation and f"arXiv:{number}" in citation
    names = re.findall(r"family-names: (\w+), given-names: (\w+)", citation)
    assert " and ".join(f"{family}, {given}" for family, given in names) == authors


def test_a_bug_report_asks_for_info():
    from s2o_cupy.tools import cli

    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    for command in re.findall(r"`(?:s2o|python -m s2o_cupy) (\w+)`", form):
        assert finished(lambda command=command: cli.main([command, "--help"])).returncode == 0
    assert "`s2o info`" in form
