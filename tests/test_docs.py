"""README.md, its neighbours and docs: code runs, commands and options exist, links lead somewhere, tables and pictures
are current, and what is read stays short."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import has_gpu

from s2o_cupy import S2OConfig, spec
from s2o_cupy.__main__ import parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
BESIDE = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "DESCRIPTION", "SECURITY", "CODE_OF_CONDUCT")]
PAGES = [page for page in (*BESIDE, *DOCS) if page.exists()]
REFERENCE = ROOT / "docs" / "reference.md"
pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists() or not (ROOT / "docs" / "figures.py").exists(), reason="needs a source checkout"
)


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, *languages):
    """(line, text) of each fenced block in one of the languages."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    return [(text_of(page)[: m.start()].count("\n") + 2, m[2]) for m in found if m[1] in languages]


def named(items):
    """Parameters with a page and a line as their name."""
    return [pytest.param(*item, id=f"{item[0].name}:{item[1]}") for item in items]


PYTHON = [(page, *block) for page in PAGES for block in blocks(page, "python")]
COMMANDS = [
    (page, line + i, command)
    for page in PAGES
    for line, block in blocks(page, "sh")
    for i, command in enumerate(block.splitlines())
    if command.split("#")[0].strip()
]


# ---------------------------------------------------------------- code


# What a module of s2o_cupy.integrations is for.
NEEDED = {
    "distributed": "torch", "drop_in": "torch", "nsa": "torch", "torch": "torch", "torch_gather": "torch", "jax": "jax",
    "diffusers": "diffusers", "transformers": "transformers", "model_tools": "transformers",
}  # fmt: skip


def imported(code):
    """Top-level modules that a block imports, and the names it takes from s2o_cupy."""
    modules, ours = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
            if node.module in ("s2o_cupy", "s2o_cupy.methods", "s2o_cupy.nsa", "s2o_cupy.tools"):
                ours |= {alias.name for alias in node.names}
            if (node.module or "").startswith("s2o_cupy.integrations."):
                modules.add(NEEDED[str(node.module).split(".")[2]])
    return modules, ours


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("page", "line", "code"), named(PYTHON))
def test_code_runs(page, line, code, tmp_path, monkeypatch):
    modules, ours = imported(code)
    assert "s2o_cupy" in modules, "a block stands for itself"
    if ("cupy" in modules or "diff" in ours) and not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    for module in modules - {"s2o_cupy"}:
        pytest.importorskip(module, {"transformers": "5.16"}.get(module))
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": "__main__"})


def test_every_framework_has_code():
    modules = set().union(*(imported(code)[0] for page, _, code in PYTHON if page.name == "README.md"))
    assert {"cupy", "torch", "jax", "s2o_cupy"} <= modules


# ---------------------------------------------------------------- commands and options


def make_targets():
    (line,) = re.findall(r"^\.PHONY: (.*)$", text_of(ROOT / "Makefile"), re.MULTILINE)
    return set(line.split())


def make_variables():
    return set(re.findall(r"^(\w+) \?=", text_of(ROOT / "Makefile"), re.MULTILINE))


def extras():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


def commands_of(whole):
    (commands,) = (a for a in whole._actions if isinstance(a.choices, dict))
    return commands.choices


def check_command(command):
    """Fail unless every part of a command that belongs to the project exists."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        for word in words[1:]:
            variable = re.match(r"(\w+)=", word)
            assert variable[1] in make_variables() if variable else word in make_targets(), word
    elif words[0] == "s2o" or words[:3] == ["python", "-m", "s2o_cupy"]:
        words = words[1 if words[0] == "s2o" else 3 :]
        if len(words) == 1 and words[0] in commands_of(parser()):  # named, not called
            return
        try:
            parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"s2o takes no such arguments: {command}")
    elif words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        source = text_of(module / "__main__.py" if module.is_dir() else module.with_suffix(".py"))
        for option in words[3:]:
            assert not option.startswith("-") or f'"{option}"' in source, f"{words[2]} has no {option}"
    elif words[0] in ("python", "torchrun"):
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        source = text_of(ROOT / words[script])
        if words[script].startswith("benchmarks/"):  # options that they share
            source += "".join(text_of(ROOT / "benchmarks" / name) for name in ("_common.py", "_kinds.py"))
        for option in re.findall(r"--([\w-]+)", " ".join(words[script + 1 :])):
            assert re.search(rf'"(--)?{option}"', source), f"{words[script]} has no --{option}"
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[(.*?)\]", command):
            assert set(extra.split(",")) <= extras(), extra
    else:
        pytest.fail(f"what is {words[0]}?")


@pytest.mark.parametrize(("page", "line", "command"), named(COMMANDS))
def test_commands_exist(page, line, command):
    check_command(command)


def cli_options():
    return {option for command in commands_of(parser()).values() for option in command._option_string_actions}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_in_a_sentence_exists(page):
    """Commands, options and files in `code`."""
    # What a table was measured with (<sub>) is of the commit that it names.
    sentences = re.sub(r"^```.*?^```$|^<sub>[^\n]*$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "torture").glob("*.py")]
    sources = [text_of(path) for path in scripts]
    for code in set(re.findall(r"`([^`\n]+)`", sentences)):
        if code == "python -m s2o_cupy":
            continue
        if re.match(r"(make|s2o|python|pip) ", code) and "**" not in code:
            check_command(code)
        elif re.fullmatch(r"--[\w-]+", code):
            assert code in cli_options() or any(f'"{code}"' in source for source in sources), code
        elif re.fullmatch(r"test_\w+\.py", code):
            assert (ROOT / "tests" / code).exists(), code
        elif re.fullmatch(r"\w+\.cuh?", code):
            assert any((ROOT / "raw_kernels").glob(f"**/{code}")), code
        elif re.fullmatch(r"[\w./]+/[\w./]*\.(py|md|png|json|cuh?)|\.ci/\w+", code):
            assert (ROOT / code).exists(), code


def test_every_command_and_extra_is_told():
    readme, commands, install = (text_of(ROOT / page) for page in ("README.md", "docs/commands.md", "docs/install.md"))
    for command in commands_of(parser()):
        assert f"`s2o {command}`" in commands
    for extra in extras():
        assert f"`{extra}`" in install
    for target in ("demo", "test"):
        assert f"`make {target}`" in readme and f"`make {target}`" in commands


def test_the_table_of_the_configuration():
    section = text_of(REFERENCE).split("## S2OConfig", 1)[1].split("\n#", 1)[0]
    told = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    expected = [(field.name, getattr(S2OConfig(), field.name)) for field in fields(S2OConfig)]
    value = lambda text: 256 << 20 if text == "256 MiB" else ast.literal_eval(text.strip("`"))  # noqa: E731
    assert [(name, value(default)) for name, default in told] == expected


def test_the_table_of_arguments():
    import inspect

    from s2o_cupy import s2o_attention

    section = text_of(REFERENCE).split("Further arguments", 1)[1].split("\n#", 1)[0]
    told = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    parameters = inspect.signature(s2o_attention).parameters
    assert set(told) | {"q", "k", "v", "config"} == set(parameters)


def test_numbers_of_the_definition():
    page, limits, readme = (
        " ".join(text_of(ROOT / name).split()) for name in ("docs/algorithm.md", "docs/limits.md", "README.md")
    )
    assert f"Up to {spec.ORDER_WHOLE:,} units are ordered by {spec.KEY_BUCKETS:,} buckets" in page
    assert f"*strata* of at most {spec.STRATUM}," in page
    assert f"Of more than {spec.MIDDLE_FROM:,}" in page and f"the first {spec.MIDDLE:,} are dealt" in page
    assert f"ordered by {spec.KEY_LEVELS} buckets" in page
    assert f"the first {spec.ORDER_HEAD:,} of this order are ordered again, by {spec.KEY_BUCKETS:,} buckets" in page
    lag = spec.STOP_LAG
    assert f'The lag is {lag["hopper"]} on path `"hopper"` and {lag["portable"]} on path `"portable"`' in page
    assert f"head_dim 1 to {spec.MAX_HEAD_DIM};" in limits
    reference = text_of(REFERENCE)
    assert f"1 to {spec.MAX_SEGMENT}." in reference
    most, few = spec.MAX_POOLED_QUERIES, S2OConfig(rank="max").pooled_queries
    assert f"one for each {spec.WEIGHT_RUN} queries unless given, up to {most['weight']}; {few} with" in reference
    assert f'with `"max"`, up to {most["max"]};' in reference
    assert f'{S2OConfig(rank="mean").segment} with rank `"max"` and `"mean"`' in reference
    assert f"a power of two up to {spec.UNITS[-1]}; {S2OConfig(rank='weight').unit} with" in reference
    assert f'{spec.DEFAULT_TAU_WITH_TAIL} with rank `"query"` and its tail, else {spec.DEFAULT_TAU}, for' in reference
    default = S2OConfig()
    assert f"segments of {default.segment}. The keys before" in readme and f"units of {default.unit} " in readme
    assert f"tiles of {default.block_m} queries visit {default.block_n} keys" in readme
    assert f'`rank="{default.rank}"`' in readme
    told = f"By default a segment has {default.segment} queries, one q tile, and a unit has {default.unit} keys"
    weight = S2OConfig(rank="weight")
    told += f'; with `"weight"` it has {weight.unit}, and each {weight.run} queries have a pooled query.'
    assert told in page
    assert f"as `clusters` groups of keys that lie close together, {default.clusters} by default" in page
    assert f"sum over whole blocks of {spec.BLOCK_UNITS} units of {spec.BLOCK_UNITS} * 2 **" in page
    assert f"keys less the mean of the whole units among the first {spec.CENTRE_KEYS} keys that stand before" in page


def test_rounds_of_the_workspace():
    from s2o_cupy.plan.device import DeviceLimits
    from s2o_cupy.plan.launches import workspace
    from s2o_cupy.problem import Problem
    from s2o_cupy.selection.methods import make_plan

    problem = Problem(1, 32, 8, 131_072, 131_072, 128, "bfloat16", True, 128**-0.5)
    plan = make_plan(problem, S2OConfig(), DeviceLimits.of_architecture(90), True)
    page = " ".join(text_of(ROOT / "docs" / "ordering.md").split())
    units, keys = (
        problem.heads * sum(geometry.ranked(n) for n in range(geometry.segments))
        for geometry in (plan.geometry, problem.geometry(S2OConfig(rank="mean")))
    )
    assert f"that is {units / 1e6:.0f} million" in page and f"{keys / 1e6:.0f} million scores of" in page
    assert max(plan.geometry.ranked(n) for n in range(plan.geometry.segments)) <= spec.ORDER_WHOLE
    page = " ".join(page.split())
    assert f"no row has more than {spec.ORDER_WHOLE:,} of them up to 131,072 tokens" in page
    assert f"makes {len(plan.chunks)} rounds" in page

    def gib(rank, unit, path="auto"):
        config = S2OConfig(rank=rank, unit=unit, path=path)
        plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True)
        return f"{workspace(plan, problem, config).nbytes / 2**30:.2g}"

    whole, four, sixteen, single = (gib("query", unit) for unit in (8, 4, 16, 1))
    told = f"The case above takes {whole} GiB in all, with units of 16 {sixteen}, of 4 {four} and with single keys"
    portable = f"On the portable path it takes {gib('query', 8, 'portable')}."
    assert f'{told} {single}; with `"weight"` {gib("weight", 16)}. {portable}' in page
    assert f"units of keys: {whole} GiB in all for" in " ".join(text_of(ROOT / "docs" / "servers.md").split())


# ---------------------------------------------------------------- links and pictures


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme():
    """Or from the README.md of its folder, which is."""
    readme = text_of(ROOT / "README.md")
    for page in DOCS:
        if page.parent.name != "docs" and page.name != "README.md":
            assert f"({page.name})" in text_of(page.parent / "README.md")
        else:
            assert f"({page.relative_to(ROOT).as_posix()})" in readme


def test_pictures_are_small():
    for picture in (ROOT / "docs").glob("*.png"):
        assert picture.stat().st_size < 600_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_folder_of_one_machine(page):
    assert not re.search(r"(?<![\w.)])/(home|root|tmp|mnt|opt|Users)/", text_of(page))


# ---------------------------------------------------------------- what is read stays short


def words(pages):
    return sum(len(text_of(page).split()) for page in pages)


def test_words():
    assert words([ROOT / "README.md"]) <= 1_000
    assert words((ROOT / "docs").glob("*.md")) <= 25_000


NARROW = [page for page in PAGES if page.parent.name != "notebook"]


@pytest.mark.parametrize("page", NARROW, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_no_table_is_wider_than_a_page(page, figures):
    for row in re.findall(r"^\|.*\|$", re.sub(r"`[^`\n]*`", "", text_of(page)), re.MULTILINE):
        assert row.count("|") - 1 <= figures.MOST_COLUMNS, row


def test_a_page_begins_with_its_question():
    for page in (ROOT / "docs").glob("*.md"):
        title, first = text_of(page).split("\n\n")[:2]
        assert title.startswith("# ") and "?" in first, page.name


# ---------------------------------------------------------------- figures


def script(name):
    """A file of docs as a module."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures():
    return script("figures")


@pytest.fixture(scope="module")
def pictures():
    return script("pictures")


def test_tables_and_pictures_are_up_to_date(figures, pictures):
    assert not figures.stale() + pictures.stale(), "python docs/figures.py writes them"
    drawn = {path.stem for path in (ROOT / "docs").glob("*.png")}
    assert drawn == {*pictures.PICTURES, "demo"}  # `make demo` draws that one


def test_a_picture_is_out_of_date_once_its_data_change(pictures, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name in ("speed_query", "retrieval_2", "small_loss"):
        (tmp_path / f"{name}.json").write_bytes((ROOT / "benchmarks" / "results" / f"{name}.json").read_bytes())
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    path, panels = pictures.path_of("time_and_loss"), []
    drawn = pictures.PICTURES["time_and_loss"].draw
    keep = lambda rows: panels.append(drawn(rows)) or panels[-1]  # noqa: E731
    monkeypatch.setitem(pictures.PICTURES, "time_and_loss", pictures.PICTURES["time_and_loss"]._replace(draw=keep))
    monkeypatch.setattr(pictures, "PICTURES", {"time_and_loss": pictures.PICTURES["time_and_loss"]})
    assert pictures.stale() == [path]
    pictures.draw(path)
    assert pictures.stale() == []
    row = {"task": "all", "attention": "s2o", "config": "default", "right": 0.99}
    rows = [row | {"length": length} for length in (32768, 131072)]
    (tmp_path / "retrieval_2.json").write_text(json.dumps({"rows": [*rows, row | {"task": "single", "length": 32768}]}))
    assert pictures.stale() == [path]
    pictures.draw(path)
    assert pictures.stale() == []
    (line,) = panels[-1].axes[1].lines
    assert list(line.get_ydata()) == [99.0, 99.0] and line.get_label() == "S2O"


def test_servers_are_told_what_was_measured():
    """In three ratios of vLLM's, those of its file; all else stands behind a link."""
    page = " ".join(text_of(ROOT / "docs" / "servers.md").split())
    result = json.loads(text_of(ROOT / "benchmarks" / "results" / "server_vllm.json"))
    of_s2o = {row["length"]: row for row in result["rows"] if (row["part"], row["attention"]) == ("one", "s2o")}
    first, second, third = (f"{1 / of_s2o[n]['speedup']:.2f}" for n in (131_072, 65_536, 16_384))
    told = f"131,072 tokens has its first token in {first} of the time, one of 65,536 in {second}, one of 16,384 in"
    assert f"{told} {third};" in page and "(figures/servers.md)" in page
    assert not re.findall(r"\d ms\b|density [\d.]+|\d MiB of", page)


def test_a_table_says_where_it_comes_from(figures, tmp_path):
    row = {
        "length": 8192, "tau": 0.01, "heads": 32, "kv_heads": 8, "head_dim": 128, "density": 0.4567, "s2o_ms": 0.98765,
        "cudnn_ms": 1.2345, "pass2_ms": 0.5, "pass2_tflops": 400.4, "cudnn_tflops": 500.1, "rel_l2": 0.0612,
    }  # fmt: skip
    result = {
        "commit": "0123456789abcdef", "date": "2026-01-02", "device": "NVIDIA H200", "cudnn": 91900,
        "command": "python benchmarks/speed.py --input /somewhere/of/mine/qkv.npz --json 'a b.json'",
        "settings": {"dtype": "bfloat16", "segment": 1024, "rank": "mean", "tail": "none"},
        "rows": [row, row | {"length": 131072, "density": 0.1, "s2o_ms": 123.4, "rel_l2": None}],
    }  # fmt: skip

    def write(name, rows, **more):
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"rows": rows} | more))

    def table(*names):
        return figures.table(*names, results=tmp_path).splitlines()

    write("speed", result["rows"])
    page = "before\n<!-- figures:speed -->\nold\n<!-- /figures -->\nafter"
    text = figures.render(page, tmp_path)
    assert figures.render(text, tmp_path) == text
    lines = text.splitlines()
    assert lines[2] == "| tokens | density | S2O ms | cuDNN ms | S2O / cuDNN | rel_l2 |"
    assert lines[4] == "| 8,192 | 0.457 | 0.988 | 1.23 | 0.800 | 0.061 |"
    assert lines[5] == "| 131,072 | 0.100 | 123 | 1.23 | 99.959 |  |"
    for part in ("NVIDIA H200", "bfloat16", "query heads 32", "commit 0123456789ab,", "cudnn 9.19.0", "2026-01-02"):
        assert part in lines[7]
    assert "tau 0.01" in lines[7] and "rank mean" in lines[7] and "tail none" in lines[7]  # what rows do not differ in
    assert "`python benchmarks/speed.py --input qkv.npz --json 'a b.json'`" in lines[7]
    assert "400" in figures.table("speed", "parts", results=tmp_path)
    (source,) = table("speed", "source", "length=8192")
    assert source.startswith("<sub>NVIDIA H200") and "tokens 8,192" in source
    for view in set(figures.VIEWS) - {"models", "answers", "servers"}:
        assert table("speed", view)[0].startswith("| ")
    with pytest.raises(ValueError, match="has no row with length=1"):
        table("speed", "time", "length=1")
    assert figures.table("retrieval_2", "answers", results=tmp_path) == (
        "Not measured yet; `make figures ONLY=retrieval_2` does that."
    )
    with pytest.raises(FileNotFoundError):  # nothing stands for figures that do not exist
        figures.render("<!-- figures:none -->\n<!-- /figures -->", tmp_path)
    wide = {key: i for i, key in enumerate(("input", "heads", "kv_heads", "head_dim", "length", "rank"))}
    write("wide", [row | {key: str(i) if key in ("input", "rank") else i for key, i in wide.items()}, row])
    with pytest.raises(ValueError, match="columns, of which a page shows 7"):
        table("wide", "time")


def test_tables_of_models(figures, tmp_path):
    def write(name, rows, command="python benchmarks/model.py"):
        about = {"commit": "0" * 40, "date": "2026-01-02", "device": "NVIDIA H200", "command": command}
        (tmp_path / f"{name}.json").write_text(json.dumps(about | {"rows": rows}))

    def table(*names):
        return figures.table(*names, results=tmp_path).splitlines()

    write("retrieval", [{"attention": "s2o", "task": task, "right": x} for task, x in (("all", 0.75), ("one", 0.5))])
    lines = table("retrieval", "answers")
    assert "75.0%" in lines[2] and "50.0%" not in "".join(lines)  # of all tasks together
    model = {"attention": "s2o", "config": "tau=0.02", "rel_l2_by_layer": [0.123, 0.0456], "rank": "weight"}
    write("model", [{"attention": "cudnn"}, model | {"rows_above_half_by_layer": [0]}])
    lines = table("model", "layers")
    assert lines[0] == "| attention | rel_l2 by layer | rows above 0.5 |"
    assert lines[2:4] == ["| cudnn |  |  |", "| S2O, rank=weight, tau=0.02 | 0.12 0.046 | 0.00% |"]
    methods = [
        {"model": model, "attention": name, "config": "default", "length": length, "loss_difference": loss}
        for model, name, length, loss in (
            ("A", "s2o", 8192, 0.1), ("A", "pbs", 4096, 0.2), ("B", "pbs", 4096, 0.3), ("B", "s2o", 8192, -0.4)
        )
    ]  # fmt: skip
    write("methods", [*methods, {"model": "A", "attention": "cudnn", "length": 4096}])
    lines = table("methods", "models")
    assert lines[2] == "| 4,096 | pbs, default | +0.2000 | +0.3000 |"
    assert lines[3] == "| 8,192 | S2O | +0.1000 | -0.4000 |"
