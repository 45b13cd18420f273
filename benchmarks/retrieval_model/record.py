#!/usr/bin/env python3
"""Record attention inputs of the retrieval model: what `s2o demo retrieval` shows.

    python benchmarks/retrieval_model/record.py s2o_cupy/data/retrieval.npz

One forward pass over a text of 16,384 tokens, on the CPU in float32; about half a minute, PyTorch and NumPy. Kept are
the last 1,024 queries of four heads, and all keys and values of the KV head that they read, after the rotary embedding.
They are rounded to 7 significant bits, one less than bfloat16 has, so that the file stays below 3 MB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent)]

import loader  # noqa: E402
import ml_dtypes  # noqa: E402
import network  # noqa: E402
import numpy as np  # noqa: E402
import texts  # noqa: E402
import torch  # noqa: E402

from s2o_cupy.tools import inputs  # noqa: E402

LENGTH, QUERIES = 16384, 1024
LAYER, KV_HEAD = 2, 0  # two of its four query heads look for single places, far away
BITS = 7


def attention_inputs(ids: np.ndarray, layer: int = LAYER) -> list[np.ndarray]:
    """q [rows, heads, length, head_dim], k and v [rows, kv_heads, length, head_dim] of one layer, float32, for ids
    [rows, length]."""
    weights, rows = loader.on_cpu(str(FOLDER / "weights.npz")), torch.from_numpy(ids.astype(np.int64))
    return [x.numpy() for x in network.qkv_by_layer(weights, rows, torch.float32)[layer]]


def rounded(x: np.ndarray, bits: int = BITS) -> np.ndarray:
    """float32 to so many significant bits, as bfloat16."""
    fraction, exponent = np.frexp(x)  # |fraction| is 0 or from 1/2 to 1
    return np.ldexp(np.round(fraction * 2**bits) / 2**bits, exponent).astype(ml_dtypes.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="the .npz file to write")
    args = parser.parse_args()

    q, k, v = attention_inputs(texts.prompt(LENGTH, seed=0).ids)
    group = loader.HEADS // loader.KV_HEADS
    heads, kv_heads = slice(KV_HEAD * group, (KV_HEAD + 1) * group), slice(KV_HEAD, KV_HEAD + 1)
    qkv = inputs.QKV(rounded(q[:, heads, -QUERIES:]), rounded(k[:, kv_heads]), rounded(v[:, kv_heads]))
    inputs.save(args.output, qkv)
    shapes = ", ".join(f"{name} {x.shape}" for name, x in qkv._asdict().items())
    print(f"{args.output}: {shapes}, bfloat16, {Path(args.output).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
