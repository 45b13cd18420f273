"""Figures that stay, as their kernels' machine code has (benchmarks/same_code.py)."""

from __future__ import annotations

import json

import benchmark_modules  # noqa: F401  (finds same_code)
import pytest

same_code, _cubin = pytest.importorskip("same_code"), pytest.importorskip("_cubin")
TEXTS = {"before": {"a": "1", "b": "1", "gone": "1"}, "now": {"a": "1", "b": "2", "new": "1"}}


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """What both checkouts say: texts of TEXTS, and the machine code that a test gives by checkout and kernel."""
    codes = {"before": {}, "now": {}}

    def digests(tree, architecture, dtype, names=None):
        which = "now" if tree == same_code.ROOT else "before"
        return TEXTS[which] if names is None else {name: codes[which][name] for name in names if name in TEXTS[which]}

    monkeypatch.setattr(same_code, "digests", digests)
    codes["before"].update(b="x", gone="x")
    codes["now"].update(b="x", new="x")
    return tmp_path, codes


def test_kernels_that_differ_are_named(listed, monkeypatch):
    before, codes = listed
    assert same_code.changed(before, "sm_90a", "bfloat16") == (["gone", "new"], 3)
    for texts in TEXTS.values():
        monkeypatch.delitem(texts, "gone", raising=False)
        monkeypatch.delitem(texts, "new", raising=False)
    assert same_code.changed(before, "sm_90a", "bfloat16") == ([], 1)
    codes["now"]["b"] = "y"
    assert same_code.changed(before, "sm_90a", "bfloat16") == (["b"], 1)


def test_names_are_no_machine_code():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no CuPy with NVRTC: {error}")

    def compiled(name, value, added):
        program = nvrtc.createProgram(
            f"__constant__ int {name} = {value}; extern \"C\" __global__ void k(int* x) {{ *x = {name} + {added}; }}",
            "k.cu", [], [],
        )  # fmt: skip
        try:
            nvrtc.compileProgram(program, ["-arch=sm_90a"])
            return nvrtc.getCUBIN(program)
        finally:
            nvrtc.destroyProgram(program)

    code = compiled("one", 1, 7)
    renamed, of_value, of_product = compiled("another", 1, 7), compiled("one", 2, 7), compiled("one", 1, 8)
    assert renamed != code
    assert _cubin.without_symbols(renamed) == _cubin.without_symbols(code)
    assert {name for name, *_ in _cubin.without_symbols(code)} >= {".text.k", ".nv.constant3"}
    for other in (of_value, of_product):
        assert _cubin.without_symbols(other) != _cubin.without_symbols(code)


def test_results_get_new_digests_where_they_have_those_of_the_commit():
    before, now = {"sm90": "1", "tail": "1", "gone": "1"}, {"sm90": "2", "tail": "1"}
    result = {"rows": [1], "kernels": {"sm90": "1", "tail": "0", "gone": "1"}}
    found = same_code.stamped(result, before, now, "why")
    assert found == {"rows": [1], "kernels": {"sm90": "2", "tail": "0", "gone": "1"}, "same_code": "why"}
    for other in ({"rows": []}, {"kernels": {"sm90": "0", "tail": "1"}}, {"kernels": {"sm90": "2", "tail": "1"}}):
        assert same_code.stamped(other, before, now, "why") == other


@pytest.mark.parametrize("differ", [[], ["b"]])
def test_nothing_is_written_where_machine_code_differs(listed, monkeypatch, capsys, differ):
    folder, _ = listed
    digests = [{"sm90": "1"}, {"sm90": "2"}]
    monkeypatch.setattr(same_code, "changed", lambda *_: (differ, 1))
    monkeypatch.setattr(same_code._digest, "kernels", lambda root=None: digests[root is None])
    monkeypatch.setattr(same_code, "RESULTS", folder)
    monkeypatch.setattr(same_code, "exported", lambda commit, to: commit)
    results = {
        "one": {"kernels": {"sm90": "1"}}, "other": {"kernels": {"sm90": "0"}},
        "half": {"kernels": {"sm90": "1"}, "settings": {"dtype": "float16"}},
    }  # fmt: skip
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    assert same_code.main(["abc"]) == len(differ)
    if not differ:
        what = {"as": "abc", "architecture": "sm_90a", "dtype": "bfloat16", "compiled": 1}
        results["one"] = {"kernels": {"sm90": "2"}, "same_code": what}
    assert {name: json.loads((folder / f"{name}.json").read_text()) for name in results} == results
    told = capsys.readouterr()
    assert ("other machine code than at abc: b" in told.err) if differ else (told.out.startswith("one.json"))
