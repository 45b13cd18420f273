#!/usr/bin/env python3
"""Pack the q, k, v of any model into a small input file for S2O.

Get q, k and v (after the rotary embedding, before attention) from your model, for example with a forward
hook or your own attention function, and save them as .npz, .npy, .safetensors or .pt. Then

    python examples/make_trace.py q_k_v.npz trace.npz --heads 0,1,4 --length 4096

keeps the named query heads, the KV heads that they read and the first tokens, rounds to bfloat16 and
writes planes of high and low bytes, compressed. `s2o_cupy.tools.inputs.load("trace.npz")` reads it, and so does
`python -m s2o_cupy diff trace.npz`. The trace inside the package was made this way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ml_dtypes

from s2o_cupy.tools import inputs


def keep_heads(qkv: inputs.QKV, kept: list[int]) -> inputs.QKV:
    """The query heads ``kept`` and their KV heads; every KV head must keep equally many query heads."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    if not kept or not all(0 <= h < q.shape[1] for h in kept):
        raise SystemExit(f"--heads {kept}: accepted: numbers from 0 to {q.shape[1] - 1}")
    kv_kept = sorted({h // group for h in kept})
    share = [[h for h in kept if h // group == g] for g in kv_kept]
    if len({len(heads) for heads in share}) != 1:
        raise SystemExit(f"--heads {kept}: accepted: equally many for each KV head; its groups are {share}")
    order = [h for heads in share for h in heads]
    return inputs.QKV(q[:, order], k[:, kv_kept], v[:, kv_kept])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", nargs="+", help="a file with q, k and v, a folder, or three .npy files")
    parser.add_argument("output", help="the .npz file to write")
    parser.add_argument("--heads", help="query heads to keep, such as 0,1,4 (default: all)")
    parser.add_argument("--length", type=int, help="tokens to keep (default: all)")
    args = parser.parse_args()

    qkv = inputs.load(args.input)
    if qkv.q.ndim == 3:
        qkv = inputs.QKV(*(x[None] for x in qkv))
    if args.heads:
        qkv = keep_heads(qkv, [int(h) for h in args.heads.split(",")])
    qkv = inputs.QKV(*(x[:, :, : args.length].astype(ml_dtypes.bfloat16) for x in qkv))
    inputs.save(args.output, qkv)
    shapes = ", ".join(f"{key} {x.shape}" for key, x in zip("qkv", qkv, strict=True))
    print(f"{args.output}: {shapes}, bfloat16, {Path(args.output).stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
