#!/usr/bin/env python3
"""Train the retrieval model of this folder on one GPU, on texts made as it goes.

    python benchmarks/retrieval_model/train.py --out weights.npz --minutes 8

By default a Llama of 4 layers, 8 query heads over 2 KV heads, head_dim 64, that finds what statements said up to
131,072 tokens before a question (`texts`). Texts grow from 128 tokens to 131,072; where they are short, positions jump
in between, so that heads learn to look far from the start. --minutes is what all stages share. A stage ends before its
time once nearly all of its answers are right, and takes up to as much again where few are. The weights so far are
written at the end of each stage, and every minute.

    python benchmarks/retrieval_model/train.py --start weights.npz --shares 0,0,0,0,0.4,0.6 --minutes 4

goes on from there, with the long texts alone. --seed, --layers, --hidden, --intermediate and --head-dim give another
model. Needs PyTorch and NumPy.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import loader
import network
import numpy as np
import texts
import torch
import torch.nn.functional as F

Tensor = Any  # torch.Tensor
HERE = pathlib.Path(__file__).parent
RATE = 2e-3
OTHER_TOKENS = 0.1  # weight in the loss of a token that is of no answer
ENOUGH, FEW = 0.995, 0.8  # right tokens of answers, at which a stage ends early, and below which it goes on
LENGTHS = (32768, 65536, 131072)
DISTANCES = (1024, 8192, 32768, 1 << 20)


class Stage(NamedTuple):
    """``share`` of the time; texts of ``length`` tokens, ``rows`` side by side, ``said`` of them statements and
    questions; about so many jumps of positions in each."""

    share: float
    rows: int
    length: int
    said: float
    jumps: float
    kinds: tuple[str, ...] = texts.KINDS


STAGES = (
    Stage(0.08, 256, 128, 0.80, 2, ("single", "variables")), Stage(0.17, 128, 512, 0.70, 3),
    Stage(0.20, 32, 2048, 0.60, 3), Stage(0.17, 8, 8192, 0.50, 3), Stage(0.13, 2, 32768, 0.35, 2),
    Stage(0.25, 1, 131072, 0.25, 0),
)  # fmt: skip


# ---------------------------------------------------------------- texts, made by other processes


class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Of a stage without end: ids, positions, and the kind of the answer that a token belongs to, from 1 on."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self.seed, info.id if info else 0))
        while True:
            yield tuple(map(torch.from_numpy, batch(rng, self.stage)))


def batch(rng: np.random.Generator, stage: Stage) -> tuple[np.ndarray, ...]:
    made = texts.made(rng, stage.rows, stage.length, stage.said, stage.kinds, at_end=int(rng.integers(0, 2)))
    if rng.random() < 0.8 and stage.jumps:
        positions = texts.jumps(rng, made.ids, stage.jumps)
    else:
        positions = np.broadcast_to(np.arange(stage.length), made.ids.shape)
    kinds = np.concatenate([[0], made.kinds + 1])[made.question]
    return made.ids, positions.astype(np.int32), kinds.astype(np.uint8)


def batches(stage: Stage, seed: int, workers: int, device: str) -> Iterator[tuple[Tensor, ...]]:
    options = {"num_workers": workers, "prefetch_factor": 4 if workers else None, "pin_memory": device == "cuda"}
    return iter(torch.utils.data.DataLoader(Batches(stage, seed), batch_size=None, **options))


# ---------------------------------------------------------------- training


class Training:
    """What goes on from stage to stage."""

    def __init__(self, args: argparse.Namespace, weights: dict[str, Tensor], dtype: Any, one_layer: Any) -> None:
        self.args, self.dtype, self.one_layer = args, dtype, one_layer
        self.weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        fused = {"fused": True} if args.device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(
            [{"params": [x for x in self.weights.values() if x.ndim == 2], "weight_decay": 0.01},
             {"params": [x for x in self.weights.values() if x.ndim == 1], "weight_decay": 0.0}],
            lr=RATE, betas=(0.9, 0.95), **fused,
        )  # fmt: skip
        self.begin = self.saved = self.told = time.monotonic()
        self.steps = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def rate(self) -> float:
        """Warmed up, held, and let down from the middle of the time on."""
        done = min(1.0, self.elapsed() / (60 * self.args.minutes))
        down = 1.0 if done < 0.45 else 0.03 + 0.97 * (0.5 + 0.5 * math.cos(math.pi * (done - 0.45) / 0.55))
        return self.args.rate * min(1.0, (self.steps + 1) / 200) * down

    def save(self) -> None:
        loader.store(self.args.out, self.weights)
        self.saved = time.monotonic()

    def step(self, ids: Tensor, positions: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each token but the first, and whether it was the likeliest."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        hidden = network.hidden_states(self.weights, ids, positions, self.dtype, self.one_layer)[:, :-1]
        following, kind = ids[:, 1:].reshape(-1), kinds[:, 1:].reshape(-1)
        found = network.logits(self.weights, hidden).reshape(len(following), -1)
        answer = kind > 0
        weight = torch.where(answer, 1.0, OTHER_TOKENS)
        each = F.cross_entropy(found.float(), following, reduction="none")
        loss = (each * weight).sum() / weight.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        self.optimizer.step()
        self.steps += 1
        return each.detach(), found.detach().argmax(-1) == following

    def run(self, stage: Stage, seconds: float, seed: int) -> None:
        """A stage, for about so long."""
        begin, last = self.elapsed(), 60 * self.args.minutes
        end, latest = begin + seconds, begin + 2 * seconds
        mean, late = 0.0, False
        for arrays in batches(stage, seed, self.args.workers, self.args.device):
            ids, positions, kinds = (x.to(self.args.device, non_blocking=True) for x in arrays)
            losses, hits = self.step(ids.long(), positions.long(), kinds)
            now = time.monotonic()
            over = self.elapsed() > end
            if now - self.told > self.args.tell or (over and not late):
                self.told = now
                kind = kinds[:, 1:].reshape(-1)
                loss = losses[kind > 0].mean().item()
                of_prose = losses[ids[:, 1:].reshape(-1) >= texts.WORDS].mean().item()
                right = [hits[kind == 1 + i].float().mean().item() for i in range(len(texts.KINDS))]
                share = hits[kind > 0].float().mean().item()
                mean = 0.5 * mean + 0.5 * share
                told = " ".join(f"{name} {x:.3f}" for name, x in zip(texts.KINDS, right, strict=True) if x == x)
                print(f"{self.elapsed():5.0f} s, {stage.length:6} tokens, step {self.steps:5}, "
                      f"nats {loss:.3f}, of prose {of_prose:.2f}; right {share:.3f}: {told}", flush=True)  # fmt: skip
                if mean > ENOUGH and end < last - 1:
                    break
            if now - self.saved > 60:
                self.save()
            late = over
            if (late and (mean > FEW or self.elapsed() > latest)) or self.elapsed() > last:
                break
        self.save()


def train(args: argparse.Namespace, stages: Sequence[Stage] = ()) -> dict[str, Tensor]:
    stages = stages or STAGES
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.start:
        weights = {name: x.float() for name, x in loader.load(args.start).items()}
    else:
        weights = network.initial(
            texts.VOCABULARY, args.hidden, args.layers, args.intermediate, args.seed, args.head_dim
        )
    weights = {name: x.to(args.device) for name, x in weights.items()}
    print(f"{sum(x.numel() for x in weights.values()) / 1e6:.2f} million weights", flush=True)
    training = Training(args, weights, dtype, compiled() if args.compile else network.layer)
    shares = args.shares or [stage.share for stage in stages]
    for i, (stage, share) in enumerate(zip(stages, shares, strict=True)):
        left = 60 * args.minutes - training.elapsed()
        if share and left > 0:  # what is left, shared with the stages behind it
            training.run(stage, left * share / sum(shares[i:]), args.seed * 1000 + i)
    return training.weights


def compiled() -> Any:
    """A layer compiled, or as it is where that fails."""
    made = torch.compile(network.layer, dynamic=False)
    failed = False

    def one_layer(*args: Any) -> Tensor:
        nonlocal failed
        if not failed:
            try:
                return made(*args)
            except Exception as error:
                print(f"not compiled: {type(error).__name__}", flush=True)
                failed = True
        return network.layer(*args)

    return one_layer


# ---------------------------------------------------------------- what it scores


def right_tokens(weights: Mapping[str, Tensor], length: int, seed: int, dtype: Any, device: str) -> list[np.ndarray]:
    """Of one text's answers, each token's kind and distance, and whether it was the likeliest."""
    made = texts.prompt(length, seed)
    ids = torch.from_numpy(made.ids).to(device).long()
    positions = torch.arange(length, device=device)[None]
    at = np.flatnonzero(made.question[0])
    with torch.no_grad():
        hidden = network.hidden_states(weights, ids, positions, dtype)[0]
        found = network.logits(weights, hidden[torch.from_numpy(at - 1).to(device)]).argmax(-1).cpu().numpy()
    return [made.kinds[made.question[0, at] - 1], made.distance[0, at], found == made.ids[0, at]]


def evaluate(path: str, device: str, lengths: tuple[int, ...] = LENGTHS, prompts: int = 4) -> list[float]:
    """Prints a table for the weights as they are stored; returns the share of right tokens of each length."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = {name: x.to(device, dtype) for name, x in loader.load(path).items()}
    shares = []
    for length in lengths:
        found = [right_tokens(weights, length, seed, dtype, device) for seed in range(prompts)]
        kinds, distances, right = (np.concatenate(x) for x in zip(*found, strict=True))
        print(f"\n{length:,} tokens, {prompts} texts: right tokens of answers, by distance")
        print(f"{'':16}{'all':>14}" + "".join(f"{f'up to {x:,}':>16}" for x in DISTANCES))
        for name, of in [*((x, kinds == i) for i, x in enumerate(texts.KINDS)), ("all", kinds >= 0)]:
            bounds = itertools.pairwise((0, *DISTANCES))
            parts = [of] + [of & (distances > near) & (distances <= far) for near, far in bounds]
            cells = [f"{right[x].mean():.4f} ({x.sum():4})" if x.any() else "" for x in parts]
            print(f"{name:16}" + "".join(f"{x:>{16 if i else 14}}" for i, x in enumerate(cells)))
        shares.append(float(right.mean()))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "weights.npz"), help="the file to write (default: the one here)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the texts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="default: 256")
    parser.add_argument("--intermediate", type=int, default=640, help="default: 640")
    parser.add_argument("--head-dim", type=int, default=network.HEAD_DIM, help=f"default: {network.HEAD_DIM}")
    parser.add_argument("--minutes", type=float, default=8, help="of training, which the stages share (default: 8)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start", help="weights to go on from (default: random ones)")
    parser.add_argument("--shares", type=lambda text: [float(x) for x in text.split(",")], metavar="S,S,S,S,S,S",
                        help="of the time, by stage; 0 leaves a stage out")  # fmt: skip
    parser.add_argument("--rate", type=float, default=RATE, help=f"the highest learning rate (default: {RATE})")
    parser.add_argument("--workers", type=int, default=min(8, max(1, (os.cpu_count() or 1) - 1)))
    parser.add_argument("--compile", action="store_true", help="compile a layer with torch.compile")
    parser.add_argument("--tell", type=float, default=5, help="seconds between lines (default: 5)")
    parser.add_argument("--evaluate", action="store_true", help="only score the weights of --out")
    args = parser.parse_args()
    if args.shares and len(args.shares) != len(STAGES):
        parser.error(f"--shares: accepted: {len(STAGES)} numbers")
    if not args.evaluate:
        train(args)
        print(f"{args.out}: {pathlib.Path(args.out).stat().st_size / 1e6:.2f} MB")
    evaluate(args.out, args.device, LENGTHS if args.device == "cuda" else (8192,))


if __name__ == "__main__":
    main()
