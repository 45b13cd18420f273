"""`make torture` without a GPU: its verdicts on processes that pass, fail, die and hang; and its random problems.

The checks themselves run on a GPU.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time

import pytest
from torture import __main__ as torture
from torture import harness
from torture.board import Board, Job, Row, run_all, run_job

SAY = "import json, os, signal, sys, time\ndef say(**x): print('@' + json.dumps(x), flush=True)\nsay(begin='toy')\n"
PASSES = "say(end='toy', status='PASS', detail='well')"


def job(code, limit=20.0, alone=False, name="toy"):
    """A process that says what a check's would."""
    return Job(name, [sys.executable, "-c", SAY + code], limit, alone)


def verdict(code, limit=20.0):
    return run_job(job(code, limit), time.monotonic() + 60)


# ---------------------------------------------------------------- one process


def test_a_check_that_passes():
    row = verdict("print('noise')\n" + PASSES)
    assert (row.status, row.detail, row.output) == ("PASS", "well", [])


def test_a_check_that_fails_shows_its_output_and_its_last_case():
    row = verdict("say(at=17); print('Traceback: o is wrong')\nsay(end='toy', status='FAIL', detail='wrong')")
    assert (row.status, row.detail) == ("FAIL", "wrong (last case 17)")
    assert row.output == ["Traceback: o is wrong"]


def test_a_crash_is_that_checks_failure_with_its_traceback():
    row = verdict("import faulthandler; faulthandler.enable(); say(at=3)\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (row.status, row.detail) == ("FAIL", "died (signal SIGSEGV): at case 3")
    assert "Fatal Python error: Segmentation fault" in row.output


def test_a_process_that_ends_early_is_a_failure():
    row = verdict("sys.exit(5)")
    assert (row.status, row.detail) == ("FAIL", "died (exit status 5): no case was announced")


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("\nos.kill(os.getpid(), signal.SIGABRT)", "passed, and then died (signal SIGABRT): well"),
        ("\ntime.sleep(300)", "passed, and then its process does not end: well"),
    ],
)
def test_a_process_that_dies_or_hangs_after_its_check_is_a_failure(monkeypatch, code, detail):
    monkeypatch.setattr("torture.board.EXIT", 1.0)
    row = verdict(PASSES + code)
    assert (row.status, row.detail) == ("FAIL", detail)


def test_a_check_that_hangs_is_killed_with_what_it_started():
    began = time.monotonic()
    code = "import subprocess; child = subprocess.Popen(['sleep', '300']); say(at=2); print(child.pid, flush=True)\n"
    row = verdict(code + "time.sleep(300)", limit=1.0)
    assert (row.status, row.detail) == ("FAIL", "hangs: at case 2")
    assert time.monotonic() - began < 30
    status = f"/proc/{row.output[0]}/status"
    time.sleep(0.2)
    try:
        with open(status) as file:
            assert "State:\tZ" in file.read()  # killed, and not yet waited for
    except FileNotFoundError:
        pass


# ---------------------------------------------------------------- the board


@pytest.fixture
def board(tmp_path):
    def make(total):
        made = Board(tmp_path / "new" / "torture.json", {"seed": 5}, total, show=lines.append)
        return made

    lines: list[str] = []
    make.lines = lines
    return make


def test_the_json_file_has_every_row(board):
    scores = board(2)
    run_all(scores, [job(PASSES, name="a"), job("sys.exit(1)", name="b")], lanes=2, end=time.monotonic() + 60)
    found = json.loads(scores.path.read_text())
    assert found["seed"] == 5
    assert found["counts"] == {"PASS": 1, "SKIP": 0, "FAIL": 1, "LATE": 0}
    assert {row["name"]: row["status"] for row in found["checks"]} == {"a": "PASS", "b": "FAIL"}
    assert sorted(line.split()[:2] for line in board.lines) == [["FAIL", "b"], ["PASS", "a"]]


@pytest.mark.parametrize(
    ("statuses", "status"), [(["PASS", "SKIP"], 0), (["PASS", "FAIL"], 1), (["PASS", "LATE"], 1), (["PASS"], 1)]
)
def test_the_exit_status(board, statuses, status):
    """0 only if all of two checks ran."""
    scores = board(2)
    for name in statuses:
        scores.add(Row("check", name))
    assert scores.exit_status() == status


def test_what_is_alone_runs_when_nothing_else_does(board, tmp_path):
    note = "open({path!r}, 'a').write({mark!r}); time.sleep(0.3); open({path!r}, 'a').write({mark!r})\n" + PASSES
    path = str(tmp_path / "order")
    jobs = [job(note.format(path=path, mark=mark), alone=mark in "xy", name=mark) for mark in "xayb"]
    run_all(board(4), jobs, lanes=2, end=time.monotonic() + 60)
    order = (tmp_path / "order").read_text()
    assert sorted(order[:4]) == ["a", "a", "b", "b"] and order[4:] == "xxyy"


def test_what_there_is_no_time_for_is_late(board):
    scores = board(1)
    run_all(scores, [job(PASSES)], lanes=1, end=time.monotonic() - 1)
    assert [row.status for row in scores.rows] == ["LATE"]


def test_progress_is_shown(board):
    run_all(board(1), [job("time.sleep(1)\n" + PASSES)], lanes=1, end=time.monotonic() + 60, every=0.1)
    assert any(line.startswith("... 0 of 1 done; running: toy") for line in board.lines)


# ---------------------------------------------------------------- what a check is told


def a_check(function=lambda run: "", seconds=10.0, shards=1, alone=False):
    return harness.Check("toy.check", function, seconds, shards, alone, True)


def test_cases_are_dealt_to_shards(capsys):
    dealt = [list(harness.Run(a_check(shards=3), 0, shard=shard).cases(8)) for shard in range(3)]
    assert dealt == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert list(harness.Run(a_check(shards=3), 0, case=7).cases(8)) == [7]
    assert '@{"at": 7}' in capsys.readouterr().out


def test_a_late_run_does_one_case(capsys):
    assert list(harness.Run(a_check(), 0, pace=-1.0).cases(8)) == [0]


def test_random_numbers_are_of_the_seed_and_the_case_alone():
    numbers = lambda seed, case: harness.Run(a_check(), seed).rng(case).random()  # noqa: E731
    assert numbers(0, 1) == numbers(0, 1)
    assert len({numbers(seed, case) for seed in range(3) for case in range(3)}) == 9


def test_the_pace_fits_the_minutes():
    checks = [a_check(seconds=40.0, shards=4), a_check(seconds=20.0, alone=True)]
    pace = torture.pace_of(checks, 4.0, lanes=2)
    assert pace * (4 * (40 + torture.START_UP) / 2 + 20 + torture.START_UP) == pytest.approx(240)
    assert torture.pace_of(checks, 0.01, lanes=2) == torture.SLOWEST_PACE


def test_jobs_are_one_for_each_shard_and_what_is_alone_comes_last():
    checks = [a_check(alone=True), a_check(seconds=5.0), a_check(shards=2)]
    found = torture.jobs(checks, seed=3, pace=1.0)
    assert [x.name for x in found] == ["toy.check 1/2", "toy.check 2/2", "toy.check", "toy.check"]
    assert [x.alone for x in found] == [False, False, False, True]
    assert found[1].command[-8:] == ["--worker", "toy.check", "--seed", "3", "--shard", "1", "--pace", "1.0"]


def test_what_is_not_accepted_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torture, "missing", lambda dry: "")
    monkeypatch.setattr(torture, "ENVIRONMENT", {})
    monkeypatch.setattr(harness, "load_checks", lambda: {"toy.check": a_check(), "toy.other": a_check()})
    assert torture.main(["--only", "nothing like it"]) == 2
    assert torture.main(["--only", "toy", "--case", "3"]) == 2
    error = capsys.readouterr().err
    assert "--only is 'nothing like it'; accepted:" in error
    assert "--only names 2 checks; accepted: one" in error


def test_a_case_runs_in_this_process_and_its_error_is_the_exit_status(capsys, monkeypatch):
    def fails(run):
        assert next(run.cases(1)) != 3, "case 3 is wrong"
        return "well"

    monkeypatch.setattr(torture, "missing", lambda dry: "")
    monkeypatch.setattr(torture, "ENVIRONMENT", {})
    monkeypatch.setattr(harness, "load_checks", lambda: {"toy.check": a_check(fails)})
    assert torture.main(["--only", "toy", "--case", "3"]) == 1
    assert "case 3 is wrong" in capsys.readouterr().out
    assert torture.main(["--only", "toy", "--case", "4"]) == 0


# ---------------------------------------------------------------- random problems, on the CPU


@pytest.fixture(scope="module")
def problems():
    """The module of random problems, small, and as without a GPU."""
    pytest.importorskip("torch")
    patch = pytest.MonkeyPatch()
    patch.setenv(harness.DRY, "1")
    from torture import random_problems

    patch.setattr(random_problems, "LONG", 90)
    yield random_problems
    patch.undo()


MODES = ("plain", "packed", "paged", "ragged")


@pytest.mark.parametrize("mode", MODES)
def test_a_case_is_plain_numbers_that_its_seed_gives(problems, mode):
    drawn = [problems.draw(random.Random(seed), mode) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert json.loads(json.dumps(drawn[0])) == drawn[0]


@pytest.mark.parametrize("mode", MODES)
def test_cases_are_problems_that_are_accepted(problems, mode):
    for seed in range(200):
        case = problems.draw(random.Random(seed), mode)
        problems.config_of(case, case["tau"])
        assert len(case["lengths_q"]) == len(case["lengths_k"])
        if case["is_causal"]:
            assert all(a <= b for a, b in zip(case["lengths_q"], case["lengths_k"], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_right_result_passes(problems, mode):
    import torch

    drawn = (problems.draw(random.Random(seed), mode) for seed in itertools.count())
    case = next(case for case in drawn if len(case["lengths_q"]) in (1, 2, 3) and max(case["lengths_q"]) > 64)
    with torch.no_grad():
        assert problems.RUN[mode](case) == []


def test_wrong_results_are_found(problems, monkeypatch):
    """Each slip in what the call returns is told."""
    import torch

    case = problems.draw(random.Random(0), "plain") | {
        "lengths_q": [40], "lengths_k": [40], "B": 1, "D": 16, "out": "sliced", "places": ["contiguous"] * 3,
        "layout": "BHSD", "kind": "model", "scale": None, "softcap": 0.0, "is_causal": True,
    }  # fmt: skip
    right = problems.s2o_attention

    def wrong(change):
        def call(*arrays, out, **options):
            _, lse, stats = right(*arrays, out=out, **options)
            change(arrays, out, lse)
            return out, lse, stats

        monkeypatch.setattr(problems, "s2o_attention", call)
        with torch.no_grad():
            return " ".join(problems.run_plain(case))

    assert wrong(lambda arrays, out, lse: None) == ""
    assert "rounding allows" in wrong(lambda arrays, out, lse: out[:, :, 7].mul_(1.1))
    assert "not finite" in wrong(lambda arrays, out, lse: out[:, :, 7].fill_(float("nan")))
    assert "lse is off" in wrong(lambda arrays, out, lse: lse.add_(0.01))
    assert "-inf" in wrong(lambda arrays, out, lse: lse[:, :, 3].fill_(-float("inf")))
    assert "v was written" in wrong(lambda arrays, out, lse: arrays[2].mul_(2))
    around = lambda arrays, out, lse: out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)  # noqa: E731
    assert "memory around out" in wrong(around)
