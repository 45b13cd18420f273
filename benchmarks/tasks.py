"""Whether a pretrained language model still finds what a long text says, with S2O in every layer, on one GPU.

    python benchmarks/tasks.py --hugging-face smollm2.gguf --lengths 4096,8192 --samples 100 --json tasks.json

Needles and chains of variables in the style of RULER (`_tasks`). The text and its right answer are read at once, and
each answer token must be the likeliest after those before it, as it would be by greedy generation. S2O is configured by
--base, by default dense_up_to=0, and by every --set. Needs PyTorch with CUDA, CuPy, transformers.
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
    rows: list[Row] = []
    with torch.inference_mode():
        for found in run_tasks(args, lambda what: report(next(done), total, what)):
            rows += found
            # After each length, so that an interrupted run leaves what it has measured.
            result = _common.provenance() | {"transformers": transformers.__version__}
            _common.write_json(args.json, {**result, "settings": _common.settings(args, rows), "rows": rows})
    return rows


def tasks(text: str) -> list[str]:
    found = _common.names(text)
    if not found or set(found) - set(_tasks.TASKS):
        raise argparse.ArgumentTypeError(f"{text}: accepted: one or more of {', '.join(_tasks.TASKS)}")
    return found


def sentences(path: str) -> list[str]:
    """Those of a text file."""
    text = re.sub(r"\s+", " ", pathlib.Path(path).read_text(encoding="utf-8")).strip()
    return re.split(r"(?<=[.!?]) ", text)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hugging-face", required=True, metavar="PATH", help=_pretrained.HELP)
    parser.add_argument("--tasks", type=tasks, default=list(_tasks.TASKS), help=f"default: {','.join(_tasks.TASKS)}")
    parser.add_argument("--lengths", type=_common.integers, default=[8192], help="tokens (default: 8192)")
    parser.add_argument("--samples", type=int, default=100, help="texts for each task and length (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--haystack", help="a text file to hide needles in (default: RULER's noise)")
    _kinds.add_arguments(parser)
    parser.set_defaults(base={"dense_up_to": 0})
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    _kinds.check(parser, args)
    if not _common.has_gpu():
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    with progress("tasks") as report:
        rows = run(args, report)
    print(_common.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
