"""Real servers on one GPU, with their own attention and with S2O: time to the first token, prompts at once, answers.

    python benchmarks/server.py --model 8b --lengths 16384,65536,131072 --many 4096,8192,16384,32768 --json server.json
    python benchmarks/server.py --model retrieval --parts answers --lengths 65536,131072
    python benchmarks/server.py --server sglang --model 8b

Starts a server by the command lines of docs/servers.md, asks it over HTTP, and stops it; by default one with its own
attention and one with S2O at the same time, half of the memory each, so that they are asked in turns. They start
without CUDA graphs, which is quicker; --graphs starts them as they are by default, --fp8 with keys and values in 8
bits. It needs vLLM or SGLang; s2o_cupy is this checkout's, where its entry points are found.

--model: 8b, of Llama-3.1-8B's shape, whose weights the server makes up; retrieval, that of benchmarks/retrieval_model;
or a folder. Made-up weights give attention that is nearly even, of which S2O visits about 1 / tau key tiles of each
query tile; --density says how many that is, of the last chunk of each length. --attentions own,s2o,own has one server
more: what it differs from the first by, two of one kind do.

one: seconds from sending a prompt of random tokens to its first token, after one that warms up: of 1,000 tokens and of
--lengths, the median of --repeats, and of more where the prompt is short.
many: all of --many sent at once: prompt tokens a second until the last has its first token.
decode: milliseconds from one token to the next, after a short prompt and after a long one.
cached: as one, of prompts whose tokens but the last 4,096 have been asked before; with a prefix cache, so by itself.
answers: of the retrieval model's texts, by one request a text: of each token of an answer, whether it was the likeliest
one (`prompt_logprobs`), as `benchmarks/tasks.py --retrieval` counts them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import _digest
import numpy as np

from s2o_cupy.tools.progress import progress

Row = dict[str, Any]
MODELS = pathlib.Path("build/server")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 140_000,
    "vocab_size": 128_256, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SHORT = 1000  # tokens of the prompt that decoding starts from
DECODED = 64  # tokens, of which the time of one is a share
SELDOM = 65_536  # tokens: prompts as long are measured --repeats times
OFTEN = 16  # times that short prompts and decoding are measured: their times spread more
NEW = 4096  # tokens of a prompt behind those that a prefix cache has
COLUMNS: list[_common.Column] = [
    ("part", "part", "s"),
    ("tokens", "length", ",d"),
    ("prompts", "prompts", "d"),
    ("attention", "attention", "s"),
    ("density", "density", ".4f"),
    ("seconds", "seconds", ".3f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("ms a token", "token_ms", ".2f"),
    ("its own / it", "speedup", ".3f"),
    ("right tokens", "right_tokens", ".4f"),
    ("right", "right", ".4f"),
    ("of", "answers", "d"),
]


# ---------------------------------------------------------------- models


def model_folder(name: str) -> pathlib.Path:
    """A folder as Hugging Face's from_pretrained reads it."""
    if name not in ("8b", "retrieval"):
        return pathlib.Path(name)
    folder = MODELS / name
    folder.mkdir(parents=True, exist_ok=True)
    if name == "8b":
        (folder / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))
    else:
        save_retrieval_model(folder)
    return folder


def save_retrieval_model(folder: pathlib.Path) -> None:
    import _retrieval
    import _small_llama
    import _sources
    import torch

    loader = _sources.module_of(str(_retrieval.FOLDER / "loader.py"))
    weights = {name: x.to(torch.bfloat16) for name, x in loader.on_cpu(str(_retrieval.WEIGHTS)).items()}
    model = _small_llama.load(loader, weights)
    model.config.max_position_embeddings = 1 << 18
    model.save_pretrained(folder)


def vocabulary(folder: pathlib.Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


# ---------------------------------------------------------------- servers


def vllm_command(args: argparse.Namespace, folder: pathlib.Path, number: int, port: int) -> list[str]:
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--served-model-name", "m",
        "--skip-tokenizer-init", "--dtype", "bfloat16", "--port", str(port),
        "--max-model-len", str(args.longest), "--max-num-batched-tokens", str(args.chunk), "--max-num-seqs", "16",
        "--gpu-memory-utilization", str(args.memory), "--shutdown-timeout", "20",
        "--enable-prefix-caching" if args.parts == ["cached"] else "--no-enable-prefix-caching",
        *([] if args.graphs else ["--enforce-eager"]), *(["--kv-cache-dtype", "fp8"] if args.fp8 else []),
    ]  # fmt: skip
    if args.attentions[number] == "s2o":
        command += ["--attention-backend", "CUSTOM", "--additional-config", json.dumps({"s2o": args.config})]
    return [*command, *(["--load-format", "dummy"] if args.model == "8b" else [])]


def sglang_command(args: argparse.Namespace, folder: pathlib.Path, number: int, port: int) -> list[str]:
    # Its share is of the memory that is free when it starts.
    share = args.memory / (1 - number * args.memory)
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--served-model-name", "m",
        "--skip-tokenizer-init", "--dtype", "bfloat16", "--port", str(port),
        "--context-length", str(args.longest), "--chunked-prefill-size", str(args.chunk),
        "--max-running-requests", "16", "--mem-fraction-static", f"{share:.3f}",
        "--attention-backend", "fa3", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        *([] if args.parts == ["cached"] else ["--disable-radix-cache"]),
        *([] if args.graphs else ["--disable-cuda-graph"]), *(["--kv-cache-dtype", "fp8_e4m3"] if args.fp8 else []),
    ]  # fmt: skip
    if args.attentions[number] == "s2o":
        command += ["--prefill-attention-backend", "s2o"]
    return [*command, *(["--load-format", "dummy"] if args.model == "8b" else [])]


COMMANDS: dict[str, Callable[..., list[str]]] = {"vllm": vllm_command, "sglang": sglang_command}


def free_port() -> int:
    """One that is free now: until a server listens there somebody else may take it."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


class Server:
    """Number ``number`` of --attentions, which has been started, and answers."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path, number: int) -> None:
        self.args, attention = args, args.attentions[number]
        self.port = args.port + number if args.port else free_port()
        self.attention = attention if attention not in args.attentions[:number] else f"{attention} again"
        self.log = MODELS / f"{args.server}_{self.attention.replace(' ', '_')}_{self.port}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if args.server == "sglang" and attention == "s2o":
            environment["S2O_CONFIG"] = json.dumps(args.config)
        self.check_port(self.port)
        command = [*COMMANDS[args.server](args, folder, number, self.port), *args.more]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @staticmethod
    def check_port(port: int) -> None:
        """Else another server would answer in this one's place."""
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(f"--port: somebody answers at {port} already; accepted: ports that are free")

    def wait(self) -> None:
        end = time.monotonic() + self.args.start_timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            time.sleep(0.5)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{self.args.server} with {self.attention} attention did not start; {self.log} ends:\n{tail}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, ids: Sequence[int] | np.ndarray, tokens: int = 1, **more: Any) -> tuple[float, Mapping[str, Any]]:
        """Seconds until all of an answer's tokens are there, and the answer."""
        began = time.perf_counter()
        with self.answer(ids, tokens, **more) as answer:
            found = answer.read()
        return time.perf_counter() - began, json.loads(found)

    def seconds_a_token(self, ids: Sequence[int] | np.ndarray, tokens: int) -> float:
        """From the first of an answer's tokens to the last one, as they come, by their number."""
        with self.answer(ids, tokens, stream=True) as answer:
            came = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
        if len(came) < 2:
            raise SystemExit(f"{self.attention}: {len(came)} parts came of an answer that was asked for token by token")
        return (came[-1] - came[0]) / (tokens - 1)

    def answer(self, ids: Sequence[int] | np.ndarray, tokens: int, **more: Any) -> Any:
        prompt, path = [int(x) for x in ids], "v1/completions"
        body: Row = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if self.args.server == "sglang":  # whose /v1/completions needs a tokenizer
            settings = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            path, body = "generate", {"input_ids": prompt, "sampling_params": settings}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", json.dumps(body | more).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.attention}: {error}: {error.read()[:500]!r}") from error

    def likeliest(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Of each token of a prompt but the first, which has none before it: whether it was the likeliest."""
        if self.args.server == "sglang":
            found = self.ask(ids, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)[1]
            top = found["meta_info"]["input_top_logprobs"]  # of each token: [[logprob, token, None]]; None of the first
            return np.array([x is not None and x[0][1] == i for x, i in zip(top, ids, strict=True)])
        logprobs = self.ask(ids, prompt_logprobs=0)[1]["choices"][0]["prompt_logprobs"]
        return np.array([x is not None and x[str(i)]["rank"] == 1 for x, i in zip(logprobs, ids, strict=True)])


@contextlib.contextmanager
def servers(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[list[Server]]:
    """All of --attentions, at the same time."""
    started: list[Server] = []
    try:
        for number in range(len(args.attentions)):
            if started:  # a server measures the memory that is free when it starts
                started[-1].wait()
            started.append(Server(args, folder, number))
        started[-1].wait()
        yield started
    finally:
        for server in started:
            server.stop()


# ---------------------------------------------------------------- parts


def in_turns(running: Sequence[Server], repeats: int, seconds: Callable[[Server], float]) -> list[float]:
    """Of each server the median, after one that warms up. Who is asked first changes each time."""
    times: list[list[float]] = [[] for _ in running]  # two may have the same attention
    for i in range(repeats + 1):
        for server, of in list(zip(running, times, strict=True))[:: -1 if i % 2 else 1]:
            of.append(seconds(server))
    return [statistics.median(of[1:]) for of in times]


def rows_of(running: Sequence[Server], seconds: Sequence[float], **common: Any) -> list[Row]:
    return [
        {**common, "attention": server.attention, "seconds": x, "speedup": seconds[0] / x}
        for server, x in zip(running, seconds, strict=True)
    ]


def one(
    running: Sequence[Server], args: argparse.Namespace, ids: np.ndarray, step: Callable[[str], None]
) -> Iterator[Row]:
    for length in (SHORT, *args.lengths):
        step(f"one prompt of {length:,}")

        def seconds(server: Server, n: int = length) -> float:
            return server.ask(ids[:n])[0]

        repeats = max(args.repeats, min(OFTEN, args.repeats * SELDOM // length))
        found = in_turns(running, repeats, seconds)
        yield from rows_of(running, found, part="one", length=length, prompts=1)


def many(
    running: Sequence[Server], args: argparse.Namespace, ids: np.ndarray, step: Callable[[str], None]
) -> Iterator[Row]:
    step(f"{len(args.many)} prompts at once")

    def seconds(server: Server) -> float:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(args.many)) as pool:
            list(pool.map(lambda i: server.ask(np.roll(ids, i)[: args.many[i]]), range(len(args.many))))
        return time.perf_counter() - began

    total = sum(args.many)
    rows = rows_of(running, in_turns(running, args.repeats, seconds), part="many", length=total, prompts=len(args.many))
    yield from (row | {"tokens_per_s": total / row["seconds"]} for row in rows)


def decode(
    running: Sequence[Server], args: argparse.Namespace, ids: np.ndarray, step: Callable[[str], None]
) -> Iterator[Row]:
    for length in (SHORT, min(args.lengths)):
        step(f"decoding after {length:,}")

        def seconds(server: Server, n: int = length) -> float:
            return server.seconds_a_token(ids[:n], DECODED + 1) * DECODED

        repeats = max(args.repeats, OFTEN)
        found = rows_of(running, in_turns(running, repeats, seconds), part="decode", length=length, prompts=1)
        yield from (row | {"token_ms": row["seconds"] / DECODED * 1e3} for row in found)


def cached(
    running: Sequence[Server], args: argparse.Namespace, ids: np.ndarray, step: Callable[[str], None]
) -> Iterator[Row]:
    calls = itertools.count(1)
    for length in args.lengths:
        step(f"the last {NEW:,} of {length:,}")

        def seconds(server: Server, n: int = length) -> float:
            prompt = np.roll(ids, 997 * next(calls))[:n]  # that no server has been asked
            server.ask(prompt[:-NEW])
            return server.ask(prompt)[0]

        found = in_turns(running, args.repeats, seconds)
        yield from rows_of(running, found, part="cached", length=length, prompts=1)


def answers(running: Sequence[Server], args: argparse.Namespace, _: Any, step: Callable[[str], None]) -> Iterator[Row]:
    import _retrieval

    for length in args.lengths:
        texts = _retrieval.prompts(length, args.samples, args.seed)
        for server in running:
            step(f"answers in {length:,} tokens: {server.attention}")
            right: list[np.ndarray] = []
            for text in texts:
                question, ids = text.question[0], text.ids[0]
                hit = server.likeliest(ids)
                right += [hit[question == n + 1] for n in range(len(text.kinds))]
            yield {
                "part": "answers", "length": length, "prompts": len(texts), "attention": server.attention,
                "right_tokens": float(np.concatenate(right).mean()), "right": float(np.mean([x.all() for x in right])),
                "answers": len(right),
            }  # fmt: skip


def densities(args: argparse.Namespace) -> dict[int, float]:
    """Of the last chunk of each length with attention that is even, by as many heads as the 8B model has."""
    import cupy

    from s2o_cupy import S2OConfig, s2o_attention

    config = S2OConfig(**{name: x for name, x in args.config.items() if name != "min_seqlen"})
    found = {}
    for length in args.lengths:
        q, k, v = (cupy.random.randn(1, n, x, 128).astype("float16") / 64
                   for n, x in ((32, min(args.chunk, length)), (8, length), (8, length)))  # fmt: skip
        found[length] = s2o_attention(q, k, v, config=config, return_stats=True)[1].density
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def version(server: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{server} {importlib.metadata.version(server)}"
    return ""


def add_served() -> None:
    """To the digests of a result: what a server's processes load of S2O to attend, which this one need not."""
    package = _digest.ROOT / "s2o_cupy"
    folders = ("api", "arrays", "cuda", "integrations", "plan", "selection", "spec")
    paths = [*package.glob("*.py"), *(path for folder in folders for path in (package / folder).rglob("*.py"))]
    named = [path.relative_to(package).as_posix() for path in paths]
    servers = {f"integrations/{name}.py" for name in ("fallbacks", "plugins", "serving", "sglang", "vllm")}
    _digest.add_loaded(name for name in named if not name.startswith("integrations/") or name in servers)


MEASURES = {"one": one, "many": many, "decode": decode, "cached": cached, "answers": answers}


# ---------------------------------------------------------------- command


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=tuple(COMMANDS), default="vllm")
    parser.add_argument("--model", default="8b", help="8b, retrieval or a folder (default: %(default)s)")
    parser.add_argument("--parts", type=_common.names, help="default: one,many,decode; of retrieval answers")
    parser.add_argument("--attentions", type=_common.names, default=["own", "s2o"], help="default: own,s2o")
    parser.add_argument("--config", type=json.loads, default={}, help='of S2O, as JSON: {"tau": 0.01}')
    parser.add_argument("--lengths", type=_common.integers, default=[16_384, 65_536, 131_072])
    parser.add_argument(
        "--many", type=_common.integers, default=[4096, 4096, 8192, 8192, 16_384, 16_384, 32_768, 40_960]
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a pass of the server (default: %(default)s)")
    parser.add_argument("--memory", type=float, help="share of the GPU's of each server (default: 0.9 of it in all)")
    parser.add_argument("--samples", type=int, default=2, help="texts of answers, of each length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--density", action="store_true", help="of S2O where attention is even")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, as by default; a minute more")
    parser.add_argument("--fp8", action="store_true", help="keys and values in 8 bits (e4m3), in all servers")
    parser.add_argument("--port", type=int, help="of the first server; the next one has the next (default: free ones)")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds (default: %(default)s)")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("more", nargs="*", help="further arguments of the server, behind --")
    args = parser.parse_args(argv)
    args.parts = args.parts or (["answers"] if args.model == "retrieval" else ["one", "many", "decode"])
    if wrong := set(args.parts) - set(MEASURES):
        parser.error(f"--parts: {', '.join(sorted(wrong))}; accepted: {', '.join(MEASURES)}")
    if "cached" in args.parts and (len(args.parts) > 1 or min(args.lengths) <= NEW):
        parser.error(f"--parts cached; accepted: by itself, as others ask twice, and with --lengths of over {NEW:,}")
    if wrong := set(args.attentions) - {"own", "s2o"}:
        parser.error(f"--attentions: {', '.join(sorted(wrong))}; accepted: own, s2o")
    args.memory = args.memory or round(0.9 / len(args.attentions), 3)
    args.longest = max(*args.lengths, *args.many) + 2 * DECODED
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped, too
    add_served()
    folder = model_folder(args.model)
    ids = np.random.default_rng(args.seed).integers(vocabulary(folder), size=args.longest)
    done = itertools.count()
    rows: list[Row] = []
    found = densities(args) if args.density else {}
    with progress("server") as report:
        step = lambda what: report(next(done), 2 + len(args.parts) * len(args.lengths), what)  # noqa: E731
        step("start")
        with servers(args, folder) as running:
            for part in args.parts:
                for row in MEASURES[part](running, args, ids, step):
                    of_s2o = {"density": found.get(row["length"])} if row["attention"] == "s2o" else {}
                    rows.append(row | of_s2o)
                    _common.write_result(args, rows, note=version(args.server))  # what there is if it is cut short
    print(_common.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
