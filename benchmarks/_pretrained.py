"""Pretrained language models from files: a folder as Hugging Face's from_pretrained reads it, or one gguf file.

A gguf file also needs the packages gguf and accelerate. Its weights are expanded to bfloat16 when they are loaded.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

HELP = "a folder that from_pretrained reads, or a .gguf file (needs the packages gguf and accelerate)"


def places(path: str) -> tuple[str, dict[str, Any]]:
    """The folder, and what from_pretrained must be told of a file in it."""
    found = pathlib.Path(path)
    if found.is_dir():
        return str(found), {}
    if found.is_file() and found.suffix == ".gguf":
        return str(found.parent), {"gguf_file": found.name}
    raise SystemExit(f"--hugging-face: {path} is neither a folder nor a .gguf file; accepted: {HELP}")


def tokenizer(path: str) -> Any:
    from s2o_cupy.integrations.text_ids import tokenizer_of

    folder, options = places(path)
    try:
        return tokenizer_of(folder, local_files_only=True, **options)
    except ValueError as error:
        raise SystemExit(f"--hugging-face: {error}") from None


def ids_of(path: str, text: str) -> np.ndarray:
    """A text file as its model reads it."""
    return np.array(tokenizer(path)(pathlib.Path(text).read_text(encoding="utf-8"))["input_ids"])


def model(path: str, device: Any) -> Any:
    """In bfloat16, its rotary embedding's frequencies in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, options = places(path)
    if options:
        from transformers import GgufConfig

        # Packed weights would be multiplied in float32, and nobody prefills with them.
        options["quantization_config"] = GgufConfig(dequantize=True)
    found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16, **options)
    return found.to(device).eval()


def context(found: Any) -> int:
    """Tokens that a model was made for."""
    return found.config.get_text_config().max_position_embeddings


def check_length(found: Any, length: int) -> None:
    if length > context(found):
        raise SystemExit(f"--lengths: {length} for a model of {context(found)} tokens; accepted: up to these")
