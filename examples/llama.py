#!/usr/bin/env python3
"""A Llama's prefill with dense attention and with S2O: time and loss of both.

    python examples/llama.py
    python examples/llama.py --model meta-llama/Llama-3.1-8B --tokens 65536 --text book.txt --tau 0.005

Without --model it makes a tiny random Llama, which shows that all fits together and nothing about speed or quality.
Without --text it reads the sources of Python's standard library. Needs PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from s2o_cupy import S2OConfig
from s2o_cupy.integrations.transformers import register

LOGITS = 2048  # rows whose logits are in memory at a time


def tiny_model(dtype: Any = torch.float32) -> Any:
    """Two layers over bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def text_of(path: str | None, length: int) -> str:
    """A file, or as much of the standard library's sources as gives ``length`` characters."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    text = ""
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        text += source.read_text(encoding="utf-8", errors="replace")
        if len(text) >= length:
            break
    return text


def tokens_of(model_name: str | None, path: str | None, count: int) -> Any:
    """(1, count) token ids."""
    if model_name is None:
        ids = torch.tensor(list(text_of(path, count).encode()))
    else:
        # Up to 8 characters a token.
        ids = AutoTokenizer.from_pretrained(model_name)(text_of(path, 8 * count), return_tensors="pt").input_ids[0]
    if len(ids) < count:
        raise SystemExit(f"--tokens {count}: the text has {len(ids)}; give fewer, or a longer --text")
    return ids[None, :count]


def prefill(model: Any, ids: Any) -> tuple[float, float]:
    """Seconds until the last hidden state, and the mean loss of predicting each next token."""
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    with torch.inference_mode():
        synchronize()
        begin = time.perf_counter()
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        synchronize()
        seconds = time.perf_counter() - begin
        head, total = model.get_output_embeddings(), 0.0
        for first in range(0, ids.shape[1] - 1, LOGITS):
            targets = ids[0, first + 1 : first + 1 + LOGITS]
            logits = head(hidden[0, first : first + len(targets)]).float()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return seconds, total / (ids.shape[1] - 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or folder of a Hugging Face model (default: a tiny random Llama)")
    parser.add_argument("--tokens", type=int, help="length of the prompt (default: 32768, or 1024 without --model)")
    parser.add_argument("--text", help="file to read the prompt from (default: Python's standard library)")
    parser.add_argument("--tau", type=float, help="S2O's stop threshold (default: the library's)")
    parser.add_argument("--segment", type=int, help="S2O's segment (default: the library's, or 128 without --model)")
    parser.add_argument("--min-seqlen", type=int, help="fewest keys for S2O (default: 8192, or 128 without --model)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, of which the fastest counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    tiny = args.model is None
    count = args.tokens or (1024 if tiny else 32_768)
    given = {"segment": 128 if tiny and args.segment is None else args.segment, "tau": args.tau}
    config = S2OConfig(**{name: value for name, value in given.items() if value is not None})
    min_seqlen = (128 if tiny else 8192) if args.min_seqlen is None else args.min_seqlen

    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = tiny_model(dtype) if tiny else AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    # No .to(dtype): that would round the frequencies of the rotary embedding too, which must stay float32.
    model = model.to(args.device).eval()
    ids = tokens_of(args.model, args.text, count).to(args.device)

    s2o = register("s2o", config, min_seqlen=min_seqlen)
    print(f"{args.model or 'tiny random Llama'}, {count:,} tokens, {str(dtype).removeprefix('torch.')}, {args.device}")
    print(f"{'attention':>9} {'ms':>10} {'tokens/s':>10} {'loss':>9}")
    found = {}
    for name in ("sdpa", "s2o"):
        model.set_attn_implementation(name)
        runs = [prefill(model, ids) for _ in range(args.repeats + 1)]  # the first compiles kernels
        found[name] = min(seconds for seconds, _ in runs[-max(1, args.repeats) :]), runs[-1][1]
        seconds, loss = found[name]
        print(f"{name:>9} {seconds * 1e3:10.1f} {count / seconds:10,.0f} {loss:9.5f}")
    if set(s2o.calls) != {"s2o"}:
        print(f"not all layers ran S2O:\n{s2o.report()}")
    return found


if __name__ == "__main__":
    main()
