"""A text as a model's tokenizer reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..extras import with_extra

with with_extra(__name__, "transformers"):
    from transformers import AutoTokenizer

__all__ = ["text_ids", "tokenizer_of"]


def tokenizer_of(model: str, **options: Any) -> Any:
    """Of a model as from_pretrained reads it, with ``options`` of from_pretrained; ValueError if it has none."""
    try:
        found = AutoTokenizer.from_pretrained(model, **options)
    except Exception as error:  # of many kinds, by what of a tokenizer is missing
        raise ValueError(_without(model, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")) from error
    if len(found) <= len(found.all_special_tokens):  # as transformers makes one of no file
        raise ValueError(_without(model, "it knows no tokens"))
    return found


def text_ids(model: str, text: str, **options: Any) -> np.ndarray:
    """The ids of a text file, (tokens,), integers."""
    return np.array(tokenizer_of(model, **options)(Path(text).read_text(encoding="utf-8"))["input_ids"], np.int64)


def _without(model: str, why: str) -> str:
    return (
        f"{model} has no tokenizer that transformers can read ({why}); accepted: a folder with the tokenizer's files, "
        "such as tokenizer.json, beside the model's, or token ids in a .npy file in place of a text"
    )
