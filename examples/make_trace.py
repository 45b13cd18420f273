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
from s2o_cupy.tools.layer_files import named_layers


def numbers(text: str) -> list[int]:
    try:
        return [int(h) for h in text.split(",")]
    except ValueError:
        raise SystemExit(f"--heads {text}: accepted: numbers, separated by commas") from None


def keep_layers(layers: tuple[int, ...] | None, heads: int, kept: list[int]) -> list[int] | None:
    """The layers whose heads are kept, or None where not all of one are, or not in order: what is left would get other
    numbers."""
    each = heads // len(layers) if layers and heads % len(layers) == 0 else 0
    if not layers or not each or kept != sorted(kept):
        return None
    found = [layer for i, layer in enumerate(layers) if {*range(i * each, (i + 1) * each)} <= {*kept}]
    return found if len(found) * each == len(kept) else None


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
    heads, (seqlen_q, seqlen_k) = qkv.q.shape[1], (x.shape[2] for x in qkv[:2])
    if args.length is not None and (args.length < 1 or seqlen_q != seqlen_k):
        came = f"--length {args.length} with {seqlen_q} queries and {seqlen_k} keys"
        raise SystemExit(f"{came}; accepted: 1 or more, of an input with a query for each key")
    kept = [*range(heads)] if args.heads is None else numbers(args.heads)
    layers = keep_layers(named_layers(args.input), heads, kept)
    qkv = keep_heads(qkv, kept)
    qkv = inputs.QKV(*(x[:, :, : args.length].astype(ml_dtypes.bfloat16) for x in qkv))
    inputs.save(args.output, qkv, layers)
    shapes = ", ".join(f"{key} {x.shape}" for key, x in zip("qkv", qkv, strict=True))
    print(f"{args.output}: {shapes}, bfloat16, {Path(args.output).stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
