"""The command line: exit status, JSON, errors in one line, and a demo whose figures are right."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import has_gpu
from in_process import Finished, finished

import s2o_cupy
import s2o_cupy.__main__
from s2o_cupy.cuda import compiler
from s2o_cupy.cuda.compiler import CompiledKernel
from s2o_cupy.tools import cli, compile_ahead, info, inputs

ROOT = Path(s2o_cupy.__file__).parents[1]


def s2o(*arguments: object, **environment: str) -> Finished:
    """``s2o`` with arguments; `test_in_a_process_of_its_own` has it as users do."""
    return finished(lambda: cli.main(list(map(str, arguments))), **environment)


@pytest.fixture(autouse=True)
def at_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---------------------------------------------------------------- arguments


def test_in_a_process_of_its_own():
    """The exit status reaches the shell, and an error is one line."""
    command = [sys.executable, "-m", "s2o_cupy"]
    result = subprocess.run([*command, "demo", "nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (cli.UNABLE, "")
    assert len(result.stderr.splitlines()) == 1 and "nowhere: neither a file" in result.stderr
    result = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (cli.OK, f"s2o_cupy {s2o_cupy.__version__}")


def test_help_and_version():
    assert "exit status:" in s2o("--help").stdout
    for command in ("demo", "tune", "diff", "info", "compile"):
        result = s2o(command, "-h")
        assert result.returncode == 0
        assert "exit status:" in result.stdout
    assert s2o("--version").stdout.strip() == f"s2o_cupy {s2o_cupy.__version__}"


# A value of each field that is no default, with what else it needs.
FIELDS = {
    "segment": (64, {}), "tau": (0.25, {}), "block_m": (64, {}), "block_n": (64, {}), "rank": ("max", {}),
    "unit": (8, {}), "pooled_queries": (4, {}), "window": (8, {}), "workspace_bytes": (2 << 20, {}),
    "path": ("portable", {}), "dense_up_to": (4096, {}), "tail": ("none", {}), "error": (0.25, {}),
    "dense_last": (512, {}), "clusters": (2, {"rank": "query"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["demo"], ()),
        (["diff"], ()),
        (["tune"], ("tau", "error")),  # what it finds, and what it is asked for
        (["tune-model", "model", "text", "--density", "0.5"], ("tau", "error")),
        (["report", "model", "text"], ("error",)),  # of which each call would find taus of its own
    ],
)
def test_every_field_of_the_configuration_is_an_option(command, found):
    assert FIELDS.keys() == s2o_cupy.S2OConfig.__dataclass_fields__.keys()
    parser = s2o_cupy.__main__.parser()
    base = {"dense_up_to": 0} if command == ["demo"] else {}
    for field, (value, more) in FIELDS.items():
        if field in found:
            continue
        given = {field: value, **more}
        options = [f"--{name.replace('_', '-')}={x}" for name, x in given.items()]
        config = cli.config_of(parser.parse_args([*command, *options]))
        assert config == s2o_cupy.S2OConfig(**{**base, **given}), field


def test_a_tau_for_each_head():
    parse = s2o_cupy.__main__.parser().parse_args
    assert cli.config_of(parse(["diff", "--tau", "0.1,0.2"])).tau == (0.1, 0.2)
    assert cli.config_of(parse(["demo", "--error", "0.1,0.2"])).error == (0.1, 0.2)
    assert "argument --tau: is '0.1,x'; accepted: a number" in s2o("diff", "--tau", "0.1,x").stderr


def test_out_and_plot_mean_the_same_everywhere():
    """--plot is a picture, --out a file of settings."""
    commands = {"demo": [], "compare": [], "tune": [], "tune-model": ["m", "t", "--density", "1"], "report": ["m", "t"]}
    parse = s2o_cupy.__main__.parser().parse_args
    for command, needs in commands.items():
        assert parse([command, *needs, "--plot", "a.png"]).plot == "a.png"
        if command.startswith("tune"):
            assert parse([command, *needs, "--out", "a.json"]).out == "a.json"
        else:
            said = s2o(command, *needs, "--out", "a.png").stderr if command != "report" else ""
            assert ("--out is not accepted; did you mean --plot?" in said) == (command != "report")


def test_tune_writes_what_register_takes(tmp_path):
    from s2o_cupy.tools.layer_settings import read_settings

    small = ["--length", "300", "--segment", "64", "--block-n", "64", "--taus", "0.5,0.1"]
    assert s2o("tune", "--density", "0.9", *small, "--out", tmp_path / "a.json").returncode == cli.OK
    settings = read_settings(tmp_path / "a.json")
    assert (settings.config.segment, settings.config.block_n) == (64, 64) and settings.config.tau is not None
    for out, message in ((tmp_path, "a file in a folder that exists"), (tmp_path / "no" / "a.json", "that exists")):
        result = s2o("tune", "--density", "0.9", *small, "--out", out)
        assert result.returncode == cli.UNABLE and message in result.stderr


@pytest.mark.parametrize("fails", ["out", "plot"])
def test_a_result_is_not_lost_with_a_file(tmp_path, monkeypatch, fails):
    """It is printed where no file can be written, and written where no picture can be drawn."""
    pytest.importorskip("matplotlib")
    from s2o_cupy.tools import plot

    def full(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(*((cli, "write_text") if fails == "out" else (plot, "draw_sweep")), full)
    out = tmp_path / "a.json"
    out.write_text("before")
    small = ["--length", "300", "--segment", "64", "--block-n", "64", "--taus", "0.5,0.1"]
    result = s2o("tune", "--density", "0.9", *small, "--out", out, "--plot", tmp_path / "a.png")
    assert result.returncode == cli.UNABLE and "the disk is full" in result.stderr and "tau" in result.stdout
    assert (out.read_text() == "before") == (fails == "out")


def test_no_file_is_read_and_written(tmp_path):
    qkv = tmp_path / "a.npz"
    inputs.save(qkv, inputs.builtin("random", 300))
    for options in (["--out", qkv], ["--out", tmp_path / "b.png", "--plot", tmp_path / "b.png"]):
        result = s2o("tune", qkv, "--density", "0.9", *options)
        assert result.returncode == cli.UNABLE and "accepted: a file of its own" in result.stderr
    assert inputs.load(qkv).q.shape[-2] == 300


def test_what_is_in_a_folder_that_is_read_stays(tmp_path):
    """Also where it is a link, or reached by one. What is not there yet may be written into it."""
    folder, out = tmp_path / "qkv", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    for name, x in inputs.builtin("random", 300)._asdict().items():
        np.save(folder / name, x)
    (folder / "v.npy").rename(out / "stored")
    (folder / "v.npy").symlink_to(out / "stored")
    (out / "link").symlink_to(folder / "k.npy")
    small = ["--density", "1", "--segment", "64", "--block-n", "64", "--taus", "0.5"]
    for path in (folder / "q.npy", folder / "v.npy", out / "link"):
        result = s2o("tune", folder, *small, "--out", path)
        assert result.returncode == cli.UNABLE and "in the folder that input is; accepted: a new" in result.stderr
    for _ in range(2):  # also in the place of what it has written
        assert s2o("tune", folder, *small, "--out", folder / "tuned.json").returncode == cli.OK


@pytest.mark.parametrize("command", ["demo", "diff", "tune", "tune-model --loss 1 m t", "report m t"])
def test_options_that_are_not_given_follow_those_that_are(command):
    from s2o_cupy.integrations import commands

    config = lambda options: cli.config_of(cli.parser([commands.add]).parse_args(f"{command} {options}".split()))  # noqa: E731
    assert config("--pooled-queries 16").rank == "weight"
    assert config("--rank mean").segment == 1024
    assert config("").values == config("--rank query").values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["nonsense"], "invalid choice"),
        (["dmo"], "; did you mean demo?"),
        (["demo", "nowhere"], "nowhere: neither a file nor a built-in input (trace, retrieval, random"),
        (["demo", "nowhere.npz"], "nowhere.npz: neither a file nor"),
        (["demo", "folder/nowhere.npz"], "folder/nowhere.npz: no such file"),
        (["demo", "--tau", "-1"], "tau is -1.0; accepted: a number >= 0"),
        (["demo", "--segment", "0"], "segment is 0"),
        (["demo", "--picture-head", "-1"], "the head to draw is -1; accepted: 0 to 3, as q has 4"),
        (["demo", "--picture-head", "17.1"], "--picture-head is '17.1'; accepted: 0 to 3, or a name from 0 to 3"),
        (["demo", "--picture-head", "9"], "the head to draw is 9; accepted: 0 to 3, as q has 4"),
        (["demo", "--tau", "0.1,0.2", "--length", "300"], "tau has 2 numbers, q has 4 heads; accepted: one number for"),
        (["demo", "--plot", "a.png", "--no-picture"], "argument --no-picture: not allowed with argument --plot"),
        (["compare", "--tau", "0.1"], "--tau is not accepted; did you mean --method s2o:tau=VALUE? accepted: --dtype"),
        (["compare", "--dense-up-to=0"], "--dense-up-to is not accepted; did you mean --method s2o:dense_up_to=VALUE?"),
        (["demo", "--segmnt", "3"], "--segmnt is not accepted; did you mean --segment? accepted: --block-m"),
        (["info", "--tau=3"], "--tau is not accepted; accepted: --help, --json, -h"),
        (["info", "trace"], "trace is not accepted; accepted: --help"),
        (["demo", "--seed", "-1"], "s2o demo: seed is -1; accepted: an integer >= 0"),
        (["tune", "slash", "--density", "1", "--length", "-3"], "s2o tune: length is -3; accepted: an integer >= 0"),
        (["compile", "--sample", "--dtype", "float16", "--arch", "sm_86"],
         "no kernel of the sample has dtypes ['float16']; accepted: bfloat16 of head_dim 128"),
        (["demo", "--length", "9999"], "length is 9999; accepted: at most 2816"),
        (["demo", "setup.cfg", "--heads", "3"], "--heads is 3; accepted only with a built-in input"),
        (["compile", "--arch", "fermi"], "--arch has 'fermi'; accepted: names such as sm_90a, of"),
        (["compile", "--arch", "90"], "--arch has '90'; accepted: names such as sm_90a, of"),
        (["compile", "--arch", ","], "accepted: names such as sm_90a"),
    ],
)
def test_wrong_arguments_exit_2_with_one_line(arguments, message):
    if "setup.cfg" in arguments and not (ROOT / "setup.cfg").exists():
        pytest.skip("setup.cfg is in a source checkout only")
    result = s2o(*arguments)
    assert result.returncode == cli.UNABLE
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("S2O_DEBUG", "1")
    with pytest.raises(ValueError, match="error is 1.0; accepted"):
        cli.main(["tune", "slash", "--length", "600", "--error", "1.0"])


def test_errors_of_any_kind_exit_2(monkeypatch):
    """1 would say that something wrong was found."""
    def broken(*_, **__):
        raise IndexError("index out of range")

    monkeypatch.setattr(inputs, "builtin", broken)
    result = s2o("demo", "--no-picture")
    assert (result.returncode, result.stdout) == (cli.UNABLE, "")
    assert result.stderr.startswith("s2o demo: IndexError: index out of range (with S2O_DEBUG=1 ")
    with pytest.raises(IndexError):
        s2o("demo", "--no-picture", S2O_DEBUG="1")


def test_errors_in_json():
    result = s2o("demo", "nowhere", "--json")
    assert result.returncode == cli.UNABLE
    assert "nowhere" in json.loads(result.stdout)["error"]


def test_a_closed_pipe_is_no_error():
    command = f'"{sys.executable}" -m s2o_cupy info --json | true; echo ${{PIPESTATUS[0]}}'
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------- info


def test_info():
    result = s2o("info", "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert found["s2o_cupy"] == s2o_cupy.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert found["kernel_sources"]
    assert (found["gpu_problem"] is None) == bool(found["gpus"]) or not has_gpu()
    text = s2o("info").stdout
    assert np.__version__ in text
    assert "cache folder" in text


def test_info_imports_no_framework():
    code = """
import sys
from s2o_cupy.tools import info
info.gather()
print('torch' in sys.modules, 'jax' in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_info_names_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("S2O_CACHE_DIR", raising=False)
    found = json.loads(s2o("info", "--json", CUPY_CACHE_DIR=str(tmp_path)).stdout)
    assert (found["cache_folder"], found["cache_problem"]) == (str(tmp_path / "s2o_cupy"), None)
    (tmp_path / "file").write_text("")
    found = json.loads(s2o("info", "--json", S2O_CACHE_DIR=str(tmp_path / "file" / "folder")).stdout)
    assert found["cache_problem"] == "Not a directory"


@pytest.mark.parametrize("broken", [None, "module"])
def test_info_never_fails(monkeypatch, broken):
    """Without CuPy, and with one on which everything raises."""
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy") if broken else None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr(info.metadata, "version", lambda name: 1 / 0)
    monkeypatch.setattr(info.shutil, "which", lambda name: None)
    found = info.gather()
    assert found["gpus"] == []
    assert found["gpu_problem"]
    assert found["cuda"] == {"driver": None, "runtime": None, "NVRTC": None}
    assert "not found" in info.table(found)


def test_info_says_why_a_gpu_cannot_be_used(monkeypatch):
    old = types.SimpleNamespace(
        is_available=lambda: True,
        cuda=types.SimpleNamespace(
            Device=lambda: types.SimpleNamespace(compute_capability="75"),
            runtime=types.SimpleNamespace(driverGetVersion=lambda: 12040, runtimeGetVersion=lambda: 12090),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", old)
    assert "compute capability 7.5" in info.gpu_problem()


# ---------------------------------------------------------------- compile


def compiled(**changes):
    fields = {"name": "pass1", "arch": "sm_90a", "registers": 200, "spill_bytes": 0, "shared_bytes": 65536}
    return CompiledKernel(**(fields | {"warnings": (), "seconds": 0.5} | changes))


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([compiled(), compiled(name="pass2")], cli.OK),
        ([compiled(), compiled(name="pass2", spill_bytes=16)], cli.FOUND),
        ([compiled(name="pass2", warnings=("C7510: wgmma serialised",))], cli.FOUND),
        ([], cli.FOUND),  # nothing compiled is no success
    ],
)
def test_compile_judges(monkeypatch, capsys, tmp_path, results, status):
    asked = []

    def compile_all(architectures, progress, dtypes, head_dims, sample):
        asked.extend((*architectures, dtypes, head_dims, sample))
        progress(1, 1)
        return results

    monkeypatch.setattr(compile_ahead, "compile_all", compile_all)
    monkeypatch.setenv("S2O_CACHE_DIR", str(tmp_path))
    assert cli.main(["compile", "--arch", "sm_90a, sm_80", "--json"]) == status
    assert asked == ["sm_90a", "sm_80", None, None, False]
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == cli.OK)
    assert len(found["kernels"]) == len(results)
    assert (found["cache_folder"], found["cache_problem"]) == (str(tmp_path), None)

    assert cli.main(["compile", "--arch", "sm_90a"]) == status
    text = capsys.readouterr().out
    assert f"kept for calls in {tmp_path}" in text
    assert ("C7510" in text) == any(kernel.warnings for kernel in results)
    assert ("pass2" in text) == (status == cli.FOUND and bool(results))  # only kernels at fault are listed
    assert cli.main(["compile", "--arch", "sm_90a", "--all"]) == status
    assert all(kernel.name in capsys.readouterr().out for kernel in results[:1])


def test_compile_of_one_dtype_and_size(monkeypatch, capsys):
    """Head sizes that share kernels are one; without --arch it is for the GPUs here, or for every one without."""
    asked = []

    def compile_all(architectures, progress, dtypes, head_dims, sample):
        asked.append((list(architectures), dtypes, head_dims, sample))
        return [compiled()]

    monkeypatch.setattr(compile_ahead, "compile_all", compile_all)
    monkeypatch.setattr(compiler, "local_architectures", lambda: ["sm_90a"])
    assert cli.main(["compile", "--dtype", "float16", "--head-dim", "80"]) == cli.OK
    monkeypatch.setattr(compiler, "local_architectures", list)
    assert cli.main(["compile", "--head-dim", "256", "--sample"]) == cli.OK
    assert asked == [(["sm_90a"], ["float16"], [128], False), (list(compiler.ARCHITECTURES), None, [256], True)]
    for head_dim in ("0", "257"):
        assert cli.main(["compile", "--head-dim", head_dim]) == cli.UNABLE
        assert f"--head-dim is {head_dim}; accepted: 1 to 256" in capsys.readouterr().err


def test_compile_says_where_nothing_can_be_kept(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("S2O_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(compile_ahead, "compile_all", lambda *asked, **options: [compiled()])
    assert cli.main(["compile"]) == cli.OK
    assert "not kept for calls: Not a directory" in capsys.readouterr().out


def test_compile_without_cupy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert cli.main(["compile"]) == cli.UNABLE
    said = capsys.readouterr().err
    assert said.startswith("s2o compile: compiling needs CuPy and NVRTC (")
    assert said.count("pip install") == 1
    assert said.endswith('remedy: pip install ".[compile]" in a checkout of s2o_cupy\n')


# ---------------------------------------------------------------- diff


def test_diff_without_a_gpu_says_so():
    if has_gpu():
        pytest.skip("there is a GPU")
    result = s2o("diff")
    assert result.returncode == cli.UNABLE
    assert len(result.stderr.strip().splitlines()) == 1
    assert "needs a GPU" in result.stderr


@pytest.mark.parametrize("ok", [True, False])
def test_diff_passes_everything_on(monkeypatch, capsys, tmp_path, ok):
    calls = []

    def diff(q, k, v, config, *, scale, softcap, is_causal, fp8, progress):
        calls.append((q, k, v, config, scale, softcap, is_causal, fp8))
        progress(1, 1)
        return types.SimpleNamespace(ok=ok, table=lambda: "the table", to_dict=lambda: {"worst": np.float32("nan")})

    monkeypatch.setitem(sys.modules, "s2o_cupy.tools.diffing", types.SimpleNamespace(diff=diff))
    monkeypatch.setattr(s2o_cupy.tools, "diffing", types.SimpleNamespace(diff=diff), raising=False)
    monkeypatch.setattr(info, "gpu_problem", lambda: None)
    line = (
        "--length 70 --heads 6 --kv-heads 2 --head-dim 64 --dtype float16 --seed 3 --segment 64 --tau 0.5 "
        "--block-m 64 --block-n 192 --rank max --pooled-queries 4 --window 8 --workspace-bytes 2000000 "
        "--scale -0.5 --softcap 30 --no-causal --fp8"
    )
    options = line.split()
    status = cli.main(["diff", "slash", *options])
    assert status == (cli.OK if ok else cli.FOUND)
    assert capsys.readouterr().out == "the table\n"
    q, k, v, config, scale, softcap, is_causal, fp8 = calls.pop()
    assert q.shape == (1, 6, 70, 64)
    assert k.shape == v.shape == (1, 2, 70, 64)
    assert q.dtype == np.float16
    expected = s2o_cupy.S2OConfig(
        segment=64, tau=0.5, block_m=64, block_n=192, rank="max", pooled_queries=4, window=8, workspace_bytes=2000000
    )  # fmt: skip
    assert (config, scale, softcap, is_causal, fp8) == (expected, -0.5, 30.0, False, True)

    np.savez(tmp_path / "a.npz", q=q, k=k, v=v)
    assert cli.main(["diff", str(tmp_path / "a.npz"), "--json"]) == status
    assert json.loads(capsys.readouterr().out) == {"ok": ok, "worst": "nan"}
    assert calls[0][3] == s2o_cupy.S2OConfig()
    assert calls[0][0].dtype == np.float16  # files as stored
    assert not calls[0][7]
    cli.main(["diff", "random", "--length", "8"])
    assert calls[1][0].dtype.name == "bfloat16"
    cli.main(["diff", str(tmp_path / "a.npz"), "--dtype", "bfloat16"])
    assert calls[2][0].dtype.name == "bfloat16"
    q[0, 2, 5, 7] = np.nan
    np.savez(tmp_path / "a.npz", q=q, k=k, v=v)
    capsys.readouterr()
    cli.main(["diff", str(tmp_path / "a.npz")])
    assert "s2o diff: note: the input q has 1 of 26,880 values that are not finite" in capsys.readouterr().err


@pytest.mark.gpu
def test_diff_on_the_gpu():
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    result = s2o("diff", "--json", "--length", "1024", "--segment", "256")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["ok"] is True


@pytest.mark.parametrize(
    ("given", "on_gpu", "dtype"),
    [([], False, "float32"), ([], True, "bfloat16"), (["--dtype", "float16"], True, "float16")],
)
def test_a_gpu_gets_patterns_as_it_takes_them(given, on_gpu, dtype):
    args = cli.parser().parse_args(["compare", "slash", "--length", "64", *given])
    assert {x.dtype.name for x in cli._input(args, on_gpu)} == {dtype}


def test_progress_of_long_work(capsys):
    """A log gets a line now and then, with the time that is left, and nothing of quick work."""
    from s2o_cupy.tools import progress

    with progress.progress("quick") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""
    with progress.progress("slow") as report:
        line = report.__self__
        for seconds, done in ((40, 2), (400, 2), (40000, 4), (400, 5)):
            line.begin, line.last = time.monotonic() - seconds, time.monotonic() - 60
            report(done, 5, "part")
            report(done, 5)
    assert capsys.readouterr().err.splitlines() == [
        "slow: 2/5, 60 s left, part", "slow: 2/5, 10 min left, part", "slow: 4/5, 2 h 47 min left, part",
        "slow: 5/5, part",
    ]  # fmt: skip
