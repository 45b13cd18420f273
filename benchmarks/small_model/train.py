#!/usr/bin/env python3
"""Train the small model of this folder, on a CPU unless --device says so, on the text that comes with Python itself.

    python benchmarks/small_model/train.py --out weights.npz
    python benchmarks/small_model/train.py --out long.npz --device cuda --long --seed 1

A Llama that reads bytes: 3 layers, 4 query heads over 2 KV heads, head_dim 64. It learns from random bytes said twice
and from the docstrings of the standard library, and is measured on text.npz, of the language reference, which it has
not seen (``pydoc_data``). So that it copies from far away, as large models do, the second half of each sequence says
pieces of the first again, and the positions between them jump by up to 131,072 (positions alone, so sequences stay
short). Among 131,072 keys, of which it has seen 4,096 at once, its attention is spread too thin, and its loss is larger
than among fewer: whatever leaves keys out seems to help. --long trains on, on sequences as long.

Another version of Python has other docstrings, and so gives other weights. Needs PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sysconfig
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
POSITIONS = 1 << 17
ROPE_THETA = 1e8  # so large that half of a head's pairs hardly turn over all these positions: what matches from afar
RATE = 3e-3
# (steps, sequences, bytes of each, share of random ones). Random bytes first, of which nothing but a copy can be
# foretold: heads that copy come of them. Long sequences last, where a query finds its place among more keys.
STAGES = ((2500, 32, 64, 1.0), (1200, 16, 256, 0.3), (150, 4, 1024, 0.3), (40, 1, 4096, 0.3))
LONG = ((60, 1, 16_384, 0.1), (80, 1, 65_536, 0.1), (80, 1, POSITIONS, 0.1))  # of --long, from a fifth of the rate on
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def docstrings(root: pathlib.Path) -> bytes:
    """Of the modules in a folder, such as the standard library, without its tests, in the order of their paths."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "pydoc_data"} & {*parts}:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(filter(None, found)).encode()


def batch(
    text: np.ndarray, rng: np.random.Generator, rows: int, length: int, random: float
) -> tuple[np.ndarray, ...]:
    """Bytes, positions, int64, and which bytes are copies, bool, [rows, length]: a text, and behind a jump pieces of it
    between new text."""
    ids, positions = np.empty((2, rows, length), np.int64)
    copies = np.zeros((rows, length), bool)
    half = length // 2

    def fresh(n: int) -> np.ndarray:
        start = rng.integers(0, len(text) - n)
        return text[start : start + n]

    for row, places, copied in zip(ids, positions, copies, strict=True):
        row[:half] = rng.integers(0, 256, half) if rng.random() < random else fresh(half)
        filled = half
        while filled < length:
            n = min(int(rng.integers(24, 128)), length - filled, half)
            again = rng.random() < 0.8
            start = int(rng.integers(0, half - n + 1)) if again else 0
            row[filled : filled + n] = row[start : start + n] if again else fresh(n)
            copied[filled : filled + n] = again
            filled += n
        # As likely from 1 to 2 as from 50,000 to 100,000.
        jump = int(np.exp(rng.uniform(0, np.log(POSITIONS - length)))) if length < POSITIONS else 0
        places[:] = rng.integers(0, POSITIONS - length - jump + 1) + np.arange(length)
        places[half:] += jump
    return ids, positions, copies


def stages(text: np.ndarray, rng: np.random.Generator, long: bool) -> Iterator[tuple[float, tuple[np.ndarray, ...]]]:
    """Of each step the rate of learning and the batch."""
    for which, scale in ((STAGES, RATE), (LONG if long else (), RATE / 5)):
        total, step = sum(stage[0] for stage in which), 0
        held = which[0][0] if which is STAGES else 0
        for steps, rows, length, random in which:
            for _ in range(steps):
                # Warmed up, held while heads come to copy, then let down.
                rate = min(1.0, step / 50, (total - step) / (total - held))
                yield scale * max(rate, 0.02), batch(text, rng, rows, length, random)
                step += 1


def train(text: np.ndarray, seed: int = 0, device: str = "cpu", long: bool = False) -> Any:
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config = LlamaConfig(
        **SIZES, rope_parameters=rope, rms_norm_eps=1e-5, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    total = sum(stage[0] for stage in STAGES + (LONG if long else ()))
    begin = time.monotonic()
    for step, (rate, arrays) in enumerate(stages(text, np.random.default_rng(seed), long)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, positions, copies = (torch.from_numpy(x).to(device) for x in arrays)
        # A mask of its own: positions that jump would otherwise be read as sequences packed one behind the other.
        with torch.autocast(device, torch.bfloat16, enabled=ids.shape[1] > STAGES[-1][2]):
            hidden = model.model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
            logits = model.lm_head(hidden.last_hidden_state[:, :-1]).float()  # [rows, length - 1, 256]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == total - 1 or (ids.shape[1] > STAGES[-1][2] and step % 20 == 0):
            of_text = ids.max(1, keepdim=True).values < 128  # random bytes go up to 255
            new, known, random = (
                each[which[:, 1:].expand_as(each)].mean().item()
                for which in (of_text & ~copies, of_text & copies, ~of_text & copies)
            )
            told = f"{new:.3f} nats a byte of text, {known:.3f} of its copies, {random:.3f} of copies of random bytes"
            print(f"{step:5} of {total}, {time.monotonic() - begin:5.0f} s: {told}", flush=True)
    return model.eval().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "weights.npz"), help="the file to write (default: the one here)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="default: cpu, half an hour; cuda takes minutes")
    parser.add_argument("--long", action="store_true", help="sequences of up to 131,072 bytes too, which take a GPU")
    args = parser.parse_args()
    text = docstrings(pathlib.Path(sysconfig.get_path("stdlib")))
    model = train(np.frombuffer(text, np.uint8), args.seed, args.device, args.long)
    weights = {name: x.detach().half().numpy() for name, x in model.named_parameters()}
    np.savez_compressed(args.out, **weights)
    print(f"{args.out}: {pathlib.Path(args.out).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
