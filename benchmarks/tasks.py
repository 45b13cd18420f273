"""Whether a language model still finds what a long text says, with S2O in every layer, on one GPU.

    python benchmarks/tasks.py --retrieval --lengths 32768,65536,131072 --set tau=0.005 --json retrieval.json
    python benchmarks/tasks.py --hugging-face smollm2.gguf --lengths 4096,8192 --samples 100 --json tasks.json

--retrieval: the model of benchmarks/retrieval_model, which was trained on texts with hundreds of statements and
questions. Right answers and right tokens by task, by distance, and of questions in the middle and at the end, with
dense attention, S2O and every published method, or those of --method; beside them density and time of attention.
Without a GPU 2,048 tokens by the NumPy reference, S2O and the methods of --method, and no time.

--hugging-face: a pretrained model. Needles and chains of variables in the style of RULER (`_tasks`), with --base by
default dense_up_to=0.

A text and its right answers are read at once, and each answer token must be the likeliest after those before it, as it
would be by greedy generation. S2O is configured by --base and by every --set. Needs PyTorch with CUDA, CuPy,
transformers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _common
import _kinds
import _pretrained
import _retrieval
import _tasks
import numpy as np
from _kinds import attention, described, kinds, told

from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
COLUMNS: list[_common.Column] = [
    ("model", "model", "s"),
    ("task", "task", "s"),
    ("tokens", "length", ",d"),
    ("attention", "attention", "s"),
    ("configuration", "config", "s"),
    ("density", "density", ".4f"),
    ("right answers", "right", ".4f"),
    ("right tokens", "right_tokens", ".4f"),
    ("nats / token", "loss", ".5f"),
    ("as dense", "as_dense", ".4f"),
]


def answers(model: Any, samples: Sequence[_tasks.Sample], device: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of every sample the likeliest tokens at the places of its answer, and the loss of its own in nats."""
    import torch

    likeliest, losses = [], []
    for sample in samples:
        ids = torch.tensor(sample.ids, device=device)
        # One position before each token of the answer.
        logits = model(ids[None], use_cache=False, logits_to_keep=sample.answer + 1).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[-sample.answer :], reduction="none")
        likeliest.append(logits.argmax(-1).cpu().numpy())
        losses.append(loss.double().cpu().numpy())
    return likeliest, losses


def run_tasks(args: argparse.Namespace, step: Callable[[str], None], device: str = "cuda") -> Iterator[list[Row]]:
    """The rows of each task and length."""
    import torch
    from _layer_errors import on_dense_trajectory

    step("model")
    model, tokenizer = _pretrained.model(args.hugging_face, device), _pretrained.tokenizer(args.hugging_face)
    encode = functools.cache(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    haystack = sentences(args.haystack) if args.haystack else _tasks.NOISE
    start = tokenizer("")["input_ids"][:1]  # a token of beginning, where the tokenizer has one
    for task, length in itertools.product(args.tasks, args.lengths):
        _pretrained.check_length(model, length)
        samples = [_tasks.sample(task, encode, length, (args.seed, i), haystack, start) for i in range(args.samples)]
        right = [np.array(sample.ids[-sample.answer :]) for sample in samples]
        ids = torch.tensor(samples[0].ids, device=device)
        densities = [found.get("density") for found in on_dense_trajectory(model, ids, kinds(args))]
        rows: list[Row] = []
        dense: list[np.ndarray] = []
        for kind, density in zip(kinds(args), densities, strict=True):
            step(f"{task}, {length:,}: {told(kind)}")
            with attention(kind) as name:
                model.set_attn_implementation(name)
                found, losses = answers(model, samples, device)
            dense = dense or found
            hits = [one == other for one, other in zip(found, right, strict=True)]
            rows.append({
                "model": pathlib.Path(args.hugging_face).name, "task": task, "length": length,
                **described(kind, length),
                "samples": args.samples, "density": density,  # of the first sample
                "right": float(np.mean([hit.all() for hit in hits])),
                "right_tokens": float(np.concatenate(hits).mean()),
                "loss": float(np.concatenate(losses).mean()),
                "as_dense": float(np.mean([(one == other).all() for one, other in zip(found, dense, strict=True)])),
            })  # fmt: skip
        yield rows


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    import torch
    import transformers

    done = itertools.count()
    total = 1 + len(args.tasks) * len(args.lengths) * len(kinds(args))
    total = _retrieval.steps(args) if args.retrieval else total
    run_any = _retrieval.run_retrieval if args.retrieval else run_tasks
    rows: list[Row] = []
    with torch.inference_mode():
        for found in run_any(args, lambda what: report(next(done), total, what)):
            rows += found
            # After each length, so that an interrupted run leaves what it has measured.
            result = _common.provenance(args.device) | {"transformers": transformers.__version__}
            _common.write_json(args.json, {**result, "settings": _common.settings(args, rows), "rows": rows})
    return rows


def sentences(path: str) -> list[str]:
    """Those of a text file."""
    text = re.sub(r"\s+", " ", pathlib.Path(path).read_text(encoding="utf-8")).strip()
    return re.split(r"(?<=[.!?]) ", text)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--retrieval", action="store_true", help="the model of benchmarks/retrieval_model")
    which.add_argument("--hugging-face", metavar="PATH", help=_pretrained.HELP)
    parser.add_argument("--tasks", type=_common.names, help="default: all")
    default = "(default: 8192; of --retrieval 32768,65536,131072, or 2048)"
    parser.add_argument("--lengths", type=_common.integers, help=f"tokens {default}")
    default = "(default: 100; of --retrieval 8, or 2, for each length)"
    parser.add_argument("--samples", type=int, help=f"texts for each task and length {default}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--haystack", help="of --hugging-face: a text file to hide needles in (default: RULER's noise)")
    _retrieval.add_arguments(parser)
    _kinds.add_arguments(parser)
    parser.set_defaults(base=None)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    if args.base is None:
        args.base = {} if args.retrieval else {"dense_up_to": 0}
    _kinds.check(parser, args)
    known = _retrieval.texts().KINDS if args.retrieval else tuple(_tasks.TASKS)
    args.tasks = [*known] if args.tasks is None else args.tasks
    if not args.tasks or set(args.tasks) - {*known}:
        parser.error(f"--tasks: {','.join(args.tasks)}; accepted: one or more of {', '.join(known)}")
    gpu = _common.has_gpu()
    args.device = "cuda" if gpu else "cpu"
    if args.haystack if args.retrieval else args.weights:
        parser.error("--haystack, --weights: accepted: --haystack with --hugging-face, --weights with --retrieval")
    if args.retrieval:
        _retrieval.settle(parser, args, gpu)
    elif not gpu:
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA, but for --retrieval")
    args.lengths, args.samples = args.lengths or [8192], args.samples or 100
    return args


def main() -> None:
    args = parse()
    with progress("tasks") as report:
        rows = run(args, report)
    print(_common.table(rows, _retrieval.COLUMNS if args.retrieval else COLUMNS))


if __name__ == "__main__":
    main()
