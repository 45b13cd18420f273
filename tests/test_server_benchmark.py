"""benchmarks/server.py asks real servers; here something answers in their place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

# Answers every token of a prompt with rank 1, but every fifth with rank 2 where its port is odd.
FAKE = r"""
    import http.server, json, sys, time
    port = int(sys.argv[1])
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def reply(self, found):
            body = json.dumps(found).encode()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
        def do_GET(self): self.reply({})
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "stream" in asked:
                self.send_response(200); self.end_headers()
                for i in range(asked.get("max_tokens") or asked["sampling_params"]["max_new_tokens"]):
                    time.sleep(0.001)
                    self.wfile.write(b"data: {}\n\n")
                return self.wfile.write(b"data: [DONE]\n\n")
            if self.path == "/generate":  # SGLang's: the likeliest token before each, here one of five another
                ids = asked["input_ids"]
                top = [None] + [[[-1.0, x + (port % 2 and i % 5 == 0), None]] for i, x in enumerate(ids) if i]
                return self.reply({"meta_info": {"input_top_logprobs": top if "return_logprob" in asked else None}})
            ranks = [None] + [{str(x): {"rank": 2 if port % 2 and i % 5 == 0 else 1}}
                              for i, x in enumerate(asked["prompt"]) if i]
            self.reply({"choices": [{"prompt_logprobs": ranks if "prompt_logprobs" in asked else None}]})
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_port() -> int:
    """The first of three neighbours that are free, and even; processes look from different ports on."""
    for port in range(18_000 + 40 * (os.getpid() % 250), 32_000, 2):
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            if all(x.connect_ex(("127.0.0.1", port + i)) for i, x in enumerate((one, two, three))):
                return port
    raise AssertionError("no free port")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The script, whose servers are the fake one."""
    module = pytest.importorskip("server")
    fake = tmp_path / "fake.py"
    fake.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(module, "MODELS", tmp_path)
    command = lambda args, folder, number, port: [sys.executable, str(fake), str(port)]  # noqa: E731
    monkeypatch.setattr(module, "COMMANDS", {"vllm": command, "sglang": command})
    monkeypatch.setattr(module._common, "provenance", lambda device: {})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 20))  # the fake starts soon
    return module


def measured(server, tmp_path, *arguments, port=free_port):
    of_port = ["--port", str(port())] if port else []
    server.main([*map(str, arguments), *of_port, "--json", str(tmp_path / "x.json")])
    return json.loads((tmp_path / "x.json").read_text())["rows"]


@pytest.mark.slow
def test_rows_of_each_part(server, tmp_path):
    """Beside each other: the same prompts, asked in turns; ratios are to the server's own attention."""
    rows = measured(server, tmp_path, "--model", "8b", "--lengths", "64,256", "--many", "8,16,32", "--repeats", 1)
    parts = [(row["part"], row["length"]) for row in rows[::2]]
    assert parts == [("one", 1000), ("one", 64), ("one", 256), ("many", 56), ("decode", 1000), ("decode", 64)]
    assert [row["attention"] for row in rows] == ["own", "s2o"] * 6
    assert [(row["part"], row["length"]) for row in rows[1::2]] == parts
    assert all(row["speedup"] == 1 for row in rows if row["attention"] == "own")
    assert all(1 <= row["token_ms"] < 20 for row in rows if row["part"] == "decode")  # a thousandth of a second each
    assert all(row["tokens_per_s"] == 56 / row["seconds"] for row in rows if row["part"] == "many")


@pytest.mark.slow
def test_two_servers_of_one_kind(server, tmp_path):
    """Beside S2O's: each is asked, and named."""
    three = ("--attentions", "own,s2o,own", "--parts", "decode", "--lengths", 64, "--many", 8, "--repeats", 1)
    rows = measured(server, tmp_path, "--model", "8b", *three)
    assert [row["attention"] for row in rows] == ["own", "s2o", "own again"] * 2
    assert {row["attention"] for row in rows if row["speedup"] == 1} == {"own"}


def test_without_a_port_servers_take_free_ones(server, monkeypatch, tmp_path):
    """So that two such scripts may run at the same time: logs are by port too."""
    begun = []
    monkeypatch.setattr(server.Server, "check_port", begun.append)
    monkeypatch.setattr(server, "DECODED", 4)
    decode = ("--parts", "decode", "--lengths", 64, "--many", 8, "--repeats", 1)
    rows = measured(server, tmp_path, "--model", "8b", *decode, port=None)
    assert [row["attention"] for row in rows] == ["own", "s2o"] * 2
    own, s2o = begun
    assert own != s2o and (tmp_path / f"vllm_own_{own}.log").exists() and (tmp_path / f"vllm_s2o_{s2o}.log").exists()


def test_what_a_prefix_cache_has_is_asked_before(server, monkeypatch, tmp_path):
    """All but the last tokens of each prompt, which no prompt before began with."""
    asked = []
    ask = server.Server.ask
    monkeypatch.setattr(server, "NEW", 16)
    monkeypatch.setattr(server.Server, "ask", lambda self, ids, *x: (asked.append(list(ids)), ask(self, ids, *x))[1])
    lengths = ("--lengths", "64,100", "--many", 8, "--repeats", 2)
    rows = measured(server, tmp_path, "--model", "8b", "--parts", "cached", *lengths)
    of = [(row["part"], row["attention"], row["length"]) for row in rows]
    assert of == [("cached", "own", 64), ("cached", "s2o", 64), ("cached", "own", 100), ("cached", "s2o", 100)]
    before, prompts = asked[::2], asked[1::2]
    assert [len(x) for x in prompts] == [64] * 6 + [100] * 6
    assert before == [x[:-16] for x in prompts] and len({tuple(x[:8]) for x in prompts}) == 12


@pytest.mark.parametrize("name", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_answers_are_counted_as_tasks_py_counts_them(server, name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    texts = ("--model", "retrieval", "--lengths", 1024, "--samples", 1)
    own, s2o = measured(server, tmp_path, "--server", name, *texts, "--many", 8)
    assert (own["right_tokens"], own["right"]) == (1, 1)
    assert 0.7 < s2o["right_tokens"] < 0.9 and s2o["right"] < 0.6  # one token of five is wrong
    assert own["answers"] == s2o["answers"] > 0


def test_servers_are_stopped_with_the_script(tmp_path):
    """Also by SIGTERM, as `timeout` sends it: a server that is left holds the GPU and the port."""
    port = free_port()
    script = tmp_path / "run.py"
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import server
        server.MODELS = server.pathlib.Path({str(tmp_path)!r})
        server.COMMANDS["vllm"] = lambda args, folder, number, port: [
            sys.executable, {str(tmp_path / "fake.py")!r}, str(port)]
        server.MEASURES["one"] = lambda *_: (print("asking", flush=True), time.sleep(60))
        server.main(["--parts", "one", "--port", "{port}", "--lengths", "64", "--many", "8"])
    """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "asking\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
    for at in (port, port + 1):
        with socket.socket() as asked:
            assert asked.connect_ex(("127.0.0.1", at)) != 0


def test_two_servers_of_one_attention_are_told_apart(server):
    """Each has the median of its own times, without the first, and they are asked in turns."""
    running = [SimpleNamespace(attention=x, took=n) for x, n in (("own", 1.0), ("s2o", 2.0), ("own", 3.0))]
    asked = []
    found = server.in_turns(running, 2, lambda x: (asked.append(x.took), x.took + 10 * (len(asked) <= 3))[1])
    assert found == [1.0, 2.0, 3.0] and asked == [1, 2, 3, 3, 2, 1, 1, 2, 3]
    assert [row["speedup"] for row in server.rows_of(running, found)] == [1, 1 / 2, 1 / 3]


def test_what_was_measured_is_kept(server, monkeypatch, tmp_path):
    """Of a run that is cut short."""
    monkeypatch.setattr(server, "OFTEN", 1)
    first = server.decode

    def cut(*arguments):
        rows = first(*arguments)
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setitem(server.MEASURES, "decode", cut)
    with pytest.raises(KeyboardInterrupt):
        measured(server, tmp_path, "--model", "8b", "--parts", "decode", "--lengths", 64, "--many", 8, "--repeats", 1)
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["part"], row["attention"]) == ("decode", "own") and row["token_ms"] > 0


def test_a_port_that_answers_is_refused(server, tmp_path):
    """Else another server, perhaps of another model, would be measured."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="answers at"):
        server.main(["--port", str(taken.getsockname()[1]), "--lengths", "64", "--many", "8"])


def test_a_server_that_does_not_start_says_why(server, monkeypatch, tmp_path):
    monkeypatch.setattr(server, "COMMANDS", {"vllm": lambda *_: [sys.executable, "-c", "raise OSError('no GPU')"]})
    began = time.monotonic()
    with pytest.raises(SystemExit, match="(?s)own attention did not start.*no GPU"):
        server.main(["--port", str(free_port()), "--lengths", "64", "--many", "8"])
    assert time.monotonic() - began < 30


def test_command_lines(server):
    """Those of docs/servers.md, beside what a measuring needs."""
    import importlib

    module = importlib.reload(server)
    args = module.parse(["--config", '{"tau": 0.02}', "--lengths", "4096", "--", "--seed", "1"])
    own, s2o = (module.vllm_command(args, Path("m"), number, 1) for number in (0, 1))
    assert set(s2o) - set(own) == {"--attention-backend", "CUSTOM", "--additional-config", '{"s2o": {"tau": 0.02}}'}
    own, s2o = (module.sglang_command(args, Path("m"), number, 1) for number in (0, 1))
    assert {"--prefill-attention-backend", "s2o"} < set(s2o) - set(own)
    # Of the memory that the first one leaves the second takes as much.
    shares = [float(x[x.index("--mem-fraction-static") + 1]) for x in (own, s2o)]
    assert shares[0] == pytest.approx((1 - shares[0]) * shares[1], abs=1e-3)
    assert args.more == ["--seed", "1"] and args.longest > 40_960
    assert os.fspath(module.MODELS) == "build/server"
    cached = module.parse(["--parts", "cached"])
    without = {module.vllm_command: "--no-enable-prefix-caching", module.sglang_command: "--disable-radix-cache"}
    for command, off in without.items():
        assert [off in command(x, Path("m"), 0, 1) for x in (args, cached)] == [True, False]
    # Of both attentions, in both servers: quick to start, or as they are started by default; keys in 8 bits if asked.
    default = module.parse(["--graphs", "--fp8"])
    for command, off in ((module.vllm_command, "--enforce-eager"), (module.sglang_command, "--disable-cuda-graph")):
        for lines in ([command(x, Path("m"), number, 1) for x in (args, default)] for number in (0, 1)):
            assert [off in line for line in lines] == [True, False]
            assert ["--kv-cache-dtype" in line for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--parts", "all"], "--parts: all; accepted:"),
        (["--attentions", "own,flash"], "--attentions: flash; accepted: own, s2o"),
        (["--parts", "one,cached"], "--parts cached; accepted: by itself"),
        (["--parts", "cached", "--lengths", "4096"], "--parts cached; accepted: by itself"),
    ],
)
def test_wrong_arguments(server, wrong, told, capsys):
    with pytest.raises(SystemExit):
        server.parse(wrong)
    assert told in capsys.readouterr().err
