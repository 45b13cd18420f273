"""The retrieval model of benchmarks/retrieval_model: how many of the questions in long texts it answers, by kind of
question, by distance and by place, and what its attention costs.

One forward pass over a text gives all answers in it: each token of an answer must be the likeliest after those before
it. An answer is right when all its tokens are.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import _common
import _sources
import numpy as np
from _kinds import attention, described, kinds, told, turns

from s2o_cupy.tools.comparing import methods_by_name

Row = dict[str, Any]
FOLDER = pathlib.Path(__file__).parent / "retrieval_model"
WEIGHTS = FOLDER / "weights.npz"
DISTANCES = (1024, 8192, 32768)  # of answers, in tokens back to the farthest statement that each is read from
END = 256  # a question of the last so many tokens is one at the end
SHORTEST = 1024  # tokens, in which every task fits
ERROR_ROWS = 1024  # of each head, of which the layers' errors are taken
COLUMNS: list[_common.Column] = [
    ("task", "task", "s"),
    ("tokens", "length", ",d"),
    ("attention", "attention", "s"),
    ("configuration", "config", "s"),
    ("density", "density", ".4f"),
    ("attention ms", "attention_ms", ".2f"),
    ("attention ratio", "x_attention", ".3f"),
    ("answers", "answers", ",d"),
    ("right", "right", ".4f"),
    ("right tokens", "right_tokens", ".4f"),
    *((f"to {x:,}", f"right_to_{x}", ".4f") for x in DISTANCES),
    ("beyond", "right_beyond", ".4f"),
    ("in the middle", "right_middle", ".4f"),
    ("at the end", "right_end", ".4f"),
    ("nats / token", "loss", ".5f"),
    ("as dense", "as_dense", ".4f"),
]


class Answers(NamedTuple):
    """Of the tokens of all answers in some texts: which answer each is of, counted through all texts, and its distance;
    of the answers: their kinds, as indices, and whether they stand at the end."""

    answer: np.ndarray
    distance: np.ndarray
    kind: np.ndarray
    at_end: np.ndarray


class Found(NamedTuple):
    """Of the same tokens: the likeliest one, whether it is right, and the loss of the right one in nats."""

    likeliest: np.ndarray
    hit: np.ndarray
    loss: np.ndarray


@functools.cache
def texts() -> Any:
    """The module that makes them."""
    return _sources.module_of(str(FOLDER / "texts.py"))


def prompts(length: int, samples: int, seed: int) -> list[Any]:
    """Texts of one row each."""
    return [texts().prompt(length, seed * 1_000_000 + i) for i in range(samples)]


def answers_of(made: Sequence[Any]) -> Answers:
    """What is asked in the texts."""
    before = itertools.accumulate((len(text.kinds) for text in made), initial=0)
    parts = []
    for text, first in zip(made, before, strict=False):
        question, length = text.question[0], text.ids.shape[1]
        at = np.flatnonzero(question)
        begin = np.full(len(text.kinds), length)
        np.minimum.at(begin, question[at] - 1, at)
        parts.append((question[at] - 1 + first, text.distance[0, at], text.kinds, begin >= length - END))
    return Answers(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def found_by(model: Any, made: Sequence[Any], device: Any) -> Found:
    """What a model answers."""
    import torch

    parts = []
    for text in made:
        at = np.flatnonzero(text.question[0])
        ids = torch.from_numpy(text.ids[0].astype(np.int64)).to(device)
        asked = torch.from_numpy(at).to(device)
        hidden = model.base_model(ids[None], use_cache=False).last_hidden_state[0, asked - 1]
        logits = model.lm_head(hidden).float()
        likeliest = logits.argmax(-1)
        loss = torch.nn.functional.cross_entropy(logits, ids[asked], reduction="none")
        found = (likeliest, likeliest == ids[asked], loss)
        parts.append([x.cpu().numpy() for x in found])
    return Found(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def scores(asked: Answers, found: Found, dense: Found, tasks: Sequence[str]) -> list[Row]:
    """A row of all answers and one of each task: the share of right answers, and of right tokens; both by distance and
    by place, with how many there are."""
    count = len(asked.kind)
    right, as_dense = np.ones((2, count), bool)
    np.logical_and.at(right, asked.answer, found.hit)
    np.logical_and.at(as_dense, asked.answer, found.likeliest == dense.likeliest)
    farthest = np.zeros(count, np.int64)
    np.maximum.at(farthest, asked.answer, asked.distance)
    rows = []
    for task in ("all", *tasks):
        of = np.isin(asked.kind, [texts().KINDS.index(x) for x in (tasks if task == "all" else [task])])
        of_token = of[asked.answer]
        row: Row = {
            "task": task, "answers": int(of.sum()), "tokens": int(of_token.sum()),
            "right": _mean(right[of]), "right_tokens": _mean(found.hit[of_token]), "loss": _mean(found.loss[of_token]),
            "as_dense": _mean(as_dense[of]),
        }  # fmt: skip
        parts = {"middle": ~asked.at_end, "end": asked.at_end}
        parts |= {name: (farthest > near) & (farthest <= far) for name, near, far in _bands()}
        by_token = {"middle": ~asked.at_end[asked.answer], "end": asked.at_end[asked.answer]}
        by_token |= {name: (asked.distance > near) & (asked.distance <= far) for name, near, far in _bands()}
        for name, part in parts.items():
            row[f"answers_{name}"] = int((of & part).sum())
            row[f"right_{name}"] = _mean(right[of & part])
            row[f"right_tokens_{name}"] = _mean(found.hit[of_token & by_token[name]])
        rows.append(row)
    return rows


def _bands() -> list[tuple[str, float, float]]:
    """Names of ranges of distances, each above the first and up to the second."""
    names = [*(f"to_{x}" for x in DISTANCES), "beyond"]
    return [(name, *band) for name, band in zip(names, itertools.pairwise((-1, *DISTANCES, np.inf)), strict=True)]


def _mean(x: np.ndarray) -> float | None:
    return float(x.mean()) if len(x) else None


# ---------------------------------------------------------------- the run


def run_retrieval(args: argparse.Namespace, step: Callable[[str], None], device: str = "") -> Iterator[list[Row]]:
    """The rows of each length."""
    import _small_llama
    import torch
    from _layer_errors import on_dense_trajectory
    from _turns import in_turns

    device = device or args.device
    step("model")
    module = _sources.module_of(str(FOLDER / "loader.py"))
    weights = module.load(args.weights)
    model = _small_llama.load(module, {name: x.to(device) for name, x in weights.items()})
    for length in args.lengths:
        step(f"{length:,}: texts")
        made = prompts(length, args.samples, args.seed)
        asked = answers_of(made)
        ids = torch.from_numpy(made[0].ids[0].astype(np.int64)).to(device)
        step(f"{length:,}: density")
        layers = on_dense_trajectory(model, ids, kinds(args), ERROR_ROWS)
        first, dense = kinds(args)[0], None
        rows: list[Row] = []
        for kind, of_layers in zip(kinds(args), layers, strict=True):
            step(f"{length:,}: {told(kind)}")
            with attention(kind) as name:
                model.set_attn_implementation(name)
                found = found_by(model, made, device)
            dense = dense or found
            scored = scores(asked, found, dense, args.tasks)
            # Of the first text.
            scored[0] |= {"density": of_layers.get("density"), "rel_l2_by_layer": of_layers["rel_l2_by_layer"]}
            if args.device == "cuda":
                times = in_turns(model, ids, turns(first, kind), args.repeats)
                (_, dense_ms), (_, ms) = times[0], times[-1]
                scored[0] |= {f"{first}_attention_ms": dense_ms, "attention_ms": ms, "x_attention": ms / dense_ms}
            rows += [{"length": length, **described(kind, length), "samples": args.samples, **row} for row in scored]
        yield rows


def steps(args: argparse.Namespace) -> int:
    return 1 + len(args.lengths) * (2 + len(kinds(args)))


# ---------------------------------------------------------------- the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of --retrieval alone."""
    parser.add_argument("--weights", help="of --retrieval (default: those of benchmarks/retrieval_model)")
    parser.add_argument("--repeats", type=int, default=5, help="of --retrieval's timings (default: 5)")
    parser.add_argument("--alone", action="store_true", help="of --retrieval: dense attention and S2O, no other method")


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, gpu: bool) -> None:
    """Defaults of --retrieval, or an end with what is wrong."""
    args.weights = args.weights or str(WEIGHTS)
    if not pathlib.Path(args.weights).is_file():
        parser.error(f"--weights: there is no {args.weights}; benchmarks/retrieval_model/train.py makes one")
    args.lengths = args.lengths or ([32768, 65536, 131072] if gpu else [2048])
    if min(args.lengths) < SHORTEST:
        parser.error(f"--lengths: {min(args.lengths)}; accepted: {SHORTEST} or more with --retrieval")
    args.samples = args.samples or (8 if gpu else 2)
    if gpu and not args.method and not args.alone:
        args.method = [name for name in methods_by_name() if name != "s2o"]
    if not gpu:
        args.baselines = ["sdpa"]
