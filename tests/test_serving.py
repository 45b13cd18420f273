"""What the plug-ins of serving engines share: settings, and how a batch is cut."""

from __future__ import annotations

import configparser
import itertools
import json
import logging
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.integrations import plugins, serving
from s2o_cupy.integrations.serving import (
    Cache,
    Counts,
    Run,
    ServingSettings,
    attend,
    cut,
    ended,
    kind_of_request,
    why_not_shape,
)
from s2o_cupy.integrations.versions import DIFFUSERS, SGLANG, VLLM, warn_if_newer


def test_settings():
    assert ServingSettings.parse({}, "here") == ServingSettings(S2OConfig(), 8192, {}, None)
    given = {
        "tau": 0.01, "segment": 256, "min_seqlen": 4096, "backend": "fa3",
        "per_layer": {"0": None, "7": {"tau": 0.002}},
    }  # fmt: skip
    found = ServingSettings.parse(given, "here")
    assert found.config == S2OConfig(tau=0.01, segment=256) and (found.min_seqlen, found.backend) == (4096, "fa3")
    assert ServingSettings.parse({"min_seqlen": 0}, "here").min_seqlen == 0
    assert found.of_layer(0) is None and found.of_layer(1) is found.config
    assert found.of_layer(7) == S2OConfig(tau=0.002, segment=256)  # the rest as everywhere


def test_settings_as_text():
    given = {"tau": 0.01, "per_layer": {"3": None}}
    assert ServingSettings.parse(json.dumps(given), "here") == ServingSettings.parse(given, "here")


def test_settings_of_a_file_that_tune_wrote(tmp_path):
    path = str(tmp_path / "tuned.json")
    written = {"config": {"tau": 0.01}, "per_layer": {"3": None, "7": {"tau": 0.1}}, "target": "loss"}
    Path(path).write_text(json.dumps(written))
    expected = ServingSettings(S2OConfig(tau=0.01), 8192, {3: None, 7: S2OConfig(tau=0.1)})
    assert ServingSettings.parse(path, "here") == ServingSettings.parse({"settings": path}, "here") == expected
    given = {"settings": path, "min_seqlen": 4096, "backend": "fa3"}
    assert ServingSettings.parse(given, "here") == replace(expected, min_seqlen=4096, backend="fa3")
    Path(path).write_text(json.dumps(written | {"min_seqlen": 1000}))  # of the file, unless it is given
    assert ServingSettings.parse(path, "here").min_seqlen == 1000
    assert ServingSettings.parse(given, "here").min_seqlen == 4096
    with pytest.raises(ValueError, match=r"^here: settings and tau came together; accepted: settings, min_seqlen and"):
        ServingSettings.parse({"settings": path, "tau": 0.1}, "here")
    Path(path).write_text(json.dumps({"config": {}, "per_layer": {"3.2": {"tau": 0.1}}}))
    with pytest.raises(ValueError, match=r'tuned.json names heads; accepted: layers, as of by="layer"$'):
        ServingSettings.parse(path, "here")


def test_a_file_whose_name_looks_like_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("[a].json").write_text('{"config": {"tau": 0.1}}')
    assert ServingSettings.parse("[a].json", "here").config == S2OConfig(tau=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "here is a int; accepted: a JSON object, or the path of a file"),
        ("{tau: 1}", "here is no JSON .*; accepted: a JSON object"),
        ({"taw": 0.1}, r"here: 'taw' is not a setting; did you mean tau\? accepted: min_seqlen, .*segment, tau,"),
        ({"tau": -1}, "here: S2OConfig: tau is -1; accepted: a number >= 0"),
        ({"error": 0.05}, "here: error is 0.05; accepted: a tau"),
        ({"min_seqlen": "8192"}, "here: min_seqlen is '8192'; accepted: an integer >= 0"),
        ({"backend": 3}, "here: backend is 3; accepted: a name"),
        ({"per_layer": [1]}, "here: per_layer is a list; accepted: a JSON object by layer"),
        ({"per_layer": {"first": None}}, "here: per_layer has the key 'first'; accepted: a layer, counted from 0"),
        ({"per_layer": {"0": 0.1}}, r"here: per_layer\[0\] is 0.1; accepted: null, or an object"),
        ({"per_layer": {"0": {"taw": 1}}}, r"here: per_layer\[0\]: S2OConfig: taw is not a field; did you mean tau"),
        ({"per_layer": {"7": {"tau": -1}}}, r"here: per_layer\[7\]: S2OConfig: tau is -1; accepted: a number >= 0"),
        ({"settings": 5}, "here: settings is 5; accepted: the path of a file that tune_model wrote"),
        ({"settings": None}, "here: settings is None; accepted: the path of a file"),
        ("[1]", r"here is \[1\]; accepted: a JSON object, or the path of a file, without quotes"),
        ('"x"', 'here is "x"; accepted: a JSON object, or the path of a file, without quotes'),
        ("[1", "here is no JSON .*; accepted: a JSON object"),
        ("tau=0.1", "here: no file 'tau=0.1'; accepted: a JSON object, or the path of a file"),
    ],
)
def test_settings_that_are_refused(given, message):
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{message}"):
        ServingSettings.parse(given, "here")


def test_layers_that_a_model_has_not():
    settings = ServingSettings.parse({"per_layer": {"0": None, "31": {"tau": 0.1}, "40": None, "32": None}}, "here")
    assert settings.within(None, "here") is settings.within(41, "here") is settings
    said = "here: per_layer names 32, 40; accepted: 0 to 31, as the model has 32 layers"
    with pytest.raises(ValueError, match=said):
        settings.within(32, "here")


def on(monkeypatch, capability):
    """This process has a GPU of such a compute capability."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_m": 100}, "here: config.block_m is 100; accepted on the GPU: 64 or 128"),
        ({"block_n": 100}, "here: config.block_n is 100; accepted on the GPU: multiples of 64 up to 1024"),
        ({"tau": [0.1, 0.2]}, "here: tau has 2 numbers; accepted: one for all heads, as a server's GPUs may have"),
        ({"tau": [0.1]}, "here: tau has 1 numbers; accepted: one for all heads"),
        (
            {"path": "hopper", "block_n": 64},
            "here: S2OConfig: path is 'hopper', but block_n is 64, not 128; accepted: 'auto' or",
        ),
        ({"per_layer": {"3": {"block_m": 32}}}, "here: per_layer[3]: config.block_m is 32; accepted on the GPU"),
    ],
)
def test_settings_that_no_prompt_could_run_by(given, message, monkeypatch):
    """They are refused when a server starts."""
    on(monkeypatch, (9, 0))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ServingSettings.parse(given, "here").within(32, "here")


@pytest.mark.parametrize(
    "given",
    [{}, {"rank": "mean"}, {"rank": "max"}, {"rank": "weight"}, {"segment": 8192}, {"segment": 1}, {"path": "hopper"},
     {"block_m": 64, "block_n": 1024}, {"unit": 128}, {"dense_up_to": 0}, {"workspace_bytes": 1 << 20}],
)  # fmt: skip
def test_settings_that_run(given, monkeypatch):
    on(monkeypatch, (9, 0))
    settings = ServingSettings.parse(given, "here")
    assert settings.within(32, "here") is settings


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_path_that_the_gpu_has_not_is_refused(capability, monkeypatch):
    """When a server starts, not at its first long prompt; also that of one layer."""
    on(monkeypatch, capability)
    for path in ("auto", "portable"):
        ServingSettings.parse({"path": path}, "here").within(32, "here")
    for asked, where in (({"path": "hopper"}, ""), ({"per_layer": {"3": {"path": "hopper"}}}, ": per_layer[3]")):
        settings = ServingSettings.parse(asked, "here")
        if capability == (9, 0):
            assert settings.within(32, "here") is settings
            continue
        said = f"here{where}: S2OConfig: path is 'hopper', but the GPU has compute capability {capability[0]}."
        with pytest.raises(ValueError, match=f"^{re.escape(said)}{capability[1]}, not 9.0; accepted: 'auto' or"):
            settings.within(32, "here")


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "kind"),
    [
        (1, 9000, "decoding"), (1, 5, "decoding"), (200, 8191, "short"), (2, 5, "short"),
        (127, 8192, "few queries"), (128, 8192, "s2o"), (9000, 9000, "s2o"),
    ],
)  # fmt: skip
def test_kinds_of_requests(seqlen_q, seqlen_k, kind):
    assert kind_of_request(seqlen_q, seqlen_k, ServingSettings.parse({}, "here")) == kind


def test_requests_have_a_tile_of_queries_in_every_layer():
    settings = ServingSettings.parse({"block_m": 64, "per_layer": {"0": None, "3": {"block_m": 128}}}, "here")
    assert [kind_of_request(n, 9000, settings) for n in (127, 128)] == ["few queries", "s2o"]
    smaller = ServingSettings.parse({"per_layer": {"3": {"block_m": 64}}}, "here")
    assert [kind_of_request(n, 9000, smaller) for n in (127, 128)] == ["few queries", "s2o"]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
def test_runs_cover_a_batch(requests):
    """Each row once and in order, S2O's runs and others in turn, none without rows."""
    lengths = [(n, n + 3) for n, _ in requests]
    kinds = ["s2o" if taken else "short" for _, taken in requests]
    runs = cut(lengths, kinds)
    rows = [row for run in runs for row in range(run.tokens.start, run.tokens.stop)]
    assert rows == list(range(sum(n for n, _ in lengths)))
    owner = [run.s2o for run in runs for seqlen_q, _ in run.lengths for _ in range(seqlen_q)]
    assert owner == [taken for n, taken in requests for _ in range(n)]
    assert all(run.tokens.start < run.tokens.stop and list(run.lengths) == lengths[run.requests] for run in runs)
    assert all(a.s2o != b.s2o for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize(
    ("queries", "budget", "step", "goes_on"),
    [
        ([8192], 8192, 1, 0),  # a chunk of a prompt
        ([8191], 8192, 1, None),
        ([8192], 8207, 16, 0),  # chunks are of whole pages
        ([8192], 8208, 16, None),
        ([8190], 8207, 16, 0),
        ([1, 8190, 1], 8192, 1, 1),  # decoding beside it
        ([1, 8189, 1], 8192, 1, None),
        ([5000, 3192], 8192, 1, None),  # one of them may, and nobody knows which
        ([1] * 8, 8, 1, None),
        ([2], 2, 1, 0),
        ([200], None, 1, None),
        ([200], -1, 1, None),  # SGLang's word for no chunks
    ],
)
def test_which_prompts_end(queries, budget, step, goes_on):
    assert ended([(n, n) for n in queries], budget, step) == [i != goes_on for i in range(len(queries))]


def test_drafted_tokens_are_no_prompt():
    lengths = [(4, 9000), (8188, 8188)]
    assert ended(lengths, 8192, of_prompts=[False, True]) == [True, False]


def test_runs_end_their_prompts_or_do_not():
    lengths = [(200, 9000), (0, 0), (200, 8200), (1, 9000), (300, 20_000), (200, 8300)]
    kinds = ["s2o", "short", "s2o", "decoding", "s2o", "s2o"]
    runs = cut(lengths, kinds, [True, False, True, False, False, True])
    assert [(run.s2o, run.ends, run.requests) for run in runs] == [
        (True, True, slice(0, 3)), (False, True, slice(3, 4)), (True, False, slice(4, 5)), (True, True, slice(5, 6)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "longest", "expected"),  # of the second and third prompt
    [({}, 7168, [256, 0]), ({}, 7167, [0]), ({"dense_last": 7}, 8192, [7]), ({"rank": "mean"}, 9000, [0])],
)
def test_the_last_queries_of_prompts_alone_attend_densely(monkeypatch, settings, longest, expected):
    """Those of a prompt that ends here, also in a chunk; no last queries of a chunk before."""
    seen = []
    monkeypatch.setattr(serving, "s2o_attention_paged", lambda *_, config, **__: seen.append(config))
    q, table, config = np.zeros((600, 1, 8)), np.zeros((4, 1)), S2OConfig(**settings)
    lengths = ((200, longest), (0, 0), (300, 1000))
    for ends in (True, False):
        attend(Run(True, slice(1, 4), slice(50, 550), lengths, ends), q, Cache(q, q, table), q, config, 1.0, 0.0)
    assert [x.dense_last for x in seen] == [*expected, 0]
    assert {replace(x, dense_last=config.dense_last) for x in seen} == {config}


def test_a_request_is_what_it_is_alone():
    """Beside a longer one whose last queries attend densely."""
    torch, config = pytest.importorskip("torch"), S2OConfig(tau=0.3, segment=64, unit=32, block_m=32, block_n=32)
    torch.manual_seed(0)
    lengths = ((500, 500), (100, 7200), (500, 500), (40, 7168))
    q, out = torch.randn(2, 1140, 2, 16)
    pages = -(-np.array(lengths)[:, 1] // 16)
    cache = torch.randn(2, pages.sum(), 16, 1, 16)
    table = torch.zeros(4, pages.max(), dtype=torch.int32)
    for row, (end, count) in enumerate(zip(pages.cumsum(), pages, strict=True)):
        table[row, :count] = torch.arange(end - count, end)
    cache = Cache(*cache, table)
    attend(Run(True, slice(0, 4), slice(0, 1140), lengths), q, cache, out, config, 0.25, 0.0)
    for n, begin in enumerate((0, 500, 600, 1100)):
        alone, tokens = torch.empty_like(q), slice(begin, begin + lengths[n][0])
        attend(Run(True, slice(n, n + 1), tokens, lengths[n : n + 1]), q, cache, alone, config, 0.25, 0.0)
        assert torch.equal(out[tokens], alone[tokens])
    first = [x[:32].reshape(1, 512, 1, 16)[:, :500] for x in cache[:2]]
    assert torch.equal(out[:500], s2o_attention(q[None, :500], *first, config=config, scale=0.25, layout="BSHD")[0])


def test_entry_points():
    """What setup.cfg tells engines to call is there."""
    setup = configparser.RawConfigParser()
    setup.read(Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")
    groups = setup["options.entry_points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        name, value = groups[group].strip().split(" = ")
        assert name == "s2o" and callable(EntryPoint(name, value, group).load())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_too_old(engine, monkeypatch, caplog):
    """It runs as without S2O."""
    for name in (engine, f"{engine}.v1.attention.backends.registry", f"{engine}.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level("WARNING"):
        logging.getLogger("vllm").propagate = True
        getattr(plugins, f"register_with_{engine}")()
    cannot = r"s2o_cupy: this \w+ has no attention that S2O can be put on \(.*\); it needs \w+ [\d.]+"
    assert re.search(cannot, caplog.text)


@pytest.mark.parametrize("tested", [VLLM, SGLANG, DIFFUSERS])
def test_versions(tested, monkeypatch, caplog):
    """Newer than tested: said once it is used, and nobody is told to upgrade further. Older: what to install."""
    *front, last = tested.newest.split(".")
    newer, same = ".".join([*front, str(int(last) + 1), "0rc1"]), f"{tested.newest}.7"
    for version, warned in ((newer, True), (same, False), ("0.0.1", False), (None, False)):
        monkeypatch.setattr(type(tested), "installed", version)
        caplog.clear()
        warn_if_newer(tested, "s2o_cupy.test")
        said = tested.cannot("a module", "something is missing")
        assert said.startswith("a module: something is missing; ") and f"=={tested.newest}.*" in said
        if warned:
            assert f"this is {tested.name} {newer}, newer than {tested.newest}" in caplog.text
            assert f"{newer}, newer than" in said and said.endswith("or a newer s2o_cupy") and "-U" not in said
        else:
            assert not caplog.records and f"it needs {tested.name} {tested.oldest} or newer" in said


@pytest.mark.parametrize("kind", ["short", "few queries", "layer", "not causal", "drafted tokens", "cache dtype"])
def test_each_reason_is_one_warning(kind, caplog):
    counts = Counts("an engine", "s2o_cupy.test")
    with caplog.at_level("INFO", "s2o_cupy.test"):
        for _ in range(3):
            counts.add_now(kind, 2)
            counts.add_now("decoding")
    said = [x for x in caplog.records if x.levelname == "WARNING"]
    assert len(said) == 1 and f"an engine's own attention takes calls of the kind '{kind}': " in said[0].message
    assert len(caplog.records) == 2  # decoding, which every server leaves to its own attention, is no warning


def test_shapes():
    assert why_not_shape(128, 128, 16) is None and why_not_shape(256, 256, 1) is None
    assert why_not_shape(264, 264, 16) == why_not_shape(128, 64, 16) == why_not_shape(100, 100, 16) == "shape"
    assert why_not_shape(128, 128, 48) == "page size"


def test_counts(caplog):
    counts = Counts("an engine", "s2o_cupy.test")
    with caplog.at_level("INFO", "s2o_cupy.test"):
        counts.add_now("s2o", 3)
        counts.add_now("mask")
        counts.add_now("s2o")
        counts._say_at_the_end()
    assert [x.levelname for x in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert caplog.records[0].message == "s2o: took its first prompt"
    assert "an engine's own attention takes calls of the kind 'mask'" in caplog.records[1].message
    assert caplog.records[2].message == (
        "s2o: requests times layers\ncalls  kind  meaning\n    4  s2o   S2O\n    1  mask  tokens that see others than "
        "the causal ones, such as those of an image or of several scored items"
    )
