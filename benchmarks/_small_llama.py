"""Llamas for benchmarks: a small trained one as a Hugging Face model, and one layer of a large one.

Qwen3s as well: Llamas that normalise queries and keys by head, which their weights show.

The small one comes as a Python file, the loader, with HEADS, KV_HEADS, ROPE_THETA and ``load(path)``, which gives the
weights by their Hugging Face names in the dtype and on the device to run in. Its ``nll(weights, ids, targets)``, the
loss of each token under dense attention by code of its own, is a check where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

Tensor = Any  # torch.Tensor

NORM_EPS = 1e-5  # Llama's; transformers' default is another


def convert(weights: Mapping[str, Tensor], heads: int, kv_heads: int, rope_theta: float) -> Any:
    """LlamaForCausalLM with these weights, in their dtype and on their device; other sizes are read from them.

    Qwen3ForCausalLM where queries and keys have norms.
    """
    table, gate = weights["model.embed_tokens.weight"], weights["model.layers.0.mlp.gate_proj.weight"]
    tied = "lm_head.weight" not in weights
    normed = "model.layers.0.self_attn.q_norm.weight" in weights
    config = (Qwen3Config if normed else LlamaConfig)(
        vocab_size=table.shape[0], hidden_size=table.shape[1], intermediate_size=gate.shape[0],
        num_hidden_layers=1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")),
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads, tie_word_embeddings=tied,
        **_shared(rope_theta),
    )  # fmt: skip
    # Not by .to(dtype), which would round the frequencies of the rotary embedding as well.
    made = Qwen3ForCausalLM if normed else LlamaForCausalLM
    model = made._from_config(config, dtype=table.dtype).to(table.device).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if tied else set()):
        raise ValueError(f"weights: not those of a Llama or Qwen3; missing {missing}, unexpected {unexpected}")
    return model


def load(module: Any, weights: Mapping[str, Tensor]) -> Any:
    """The model of a loader's weights."""
    return convert(weights, module.HEADS, module.KV_HEADS, module.ROPE_THETA)


def _shared(rope_theta: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    return {
        "rms_norm_eps": NORM_EPS, "rope_parameters": rope, "max_position_embeddings": 1 << 20,
        "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa",
    }  # fmt: skip


def tokens(text: np.ndarray, length: int, device: Any) -> tuple[Tensor, Tensor]:
    """The first ``length`` ids of a text, and those that follow each."""
    ids = text[: length + 1].astype(np.int64)
    if len(ids) <= length:
        raise ValueError(f"{length} tokens and the one after them of a text of {len(ids)}; accepted: shorter lengths")
    found = torch.from_numpy(ids).to(device)
    return found[:-1], found[1:]


class Layer:
    """A decoder layer with random weights and random hidden states of ``length`` tokens."""

    def __init__(self, sizes: tuple[int, int, int], intermediate: int, length: int, dtype: Any, device: Any) -> None:
        hidden, heads, kv_heads = sizes
        self.config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=hidden // heads, **_shared(5e5),
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.layer = LlamaDecoderLayer(self.config, 0).to(dtype).eval()
            self.hidden = torch.randn(1, length, hidden, dtype=dtype)
            self.rotary = LlamaRotaryEmbedding(self.config)(self.hidden, torch.arange(length)[None])

    def __call__(self, name: str = "sdpa") -> Tensor:
        """Under one of transformers' attention functions."""
        self.config._attn_implementation = name
        return self.layer(self.hidden, position_embeddings=self.rotary)

    def attention(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """That function alone, as the layer calls it: [1, seqlen, heads, head_dim]."""
        module = self.layer.self_attn
        return ALL_ATTENTION_FUNCTIONS[name](module, q, k, v, None, dropout=0.0, scaling=module.scaling)[0]


@contextlib.contextmanager
def hooked(name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """``hook(function, module, q, k, v, ...)`` in the place of transformers' attention function of that name."""
    function = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = lambda *args, **options: hook(function, *args, **options)  # of this object only
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def skip(function: Any, module: Any, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """A hook for a layer without attention: q is the output, which costs nothing."""
    return q.transpose(1, 2), None


def instead(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Any]:
    """A hook that attends with these q, k and v in the place of the layer's own."""
    return lambda function, module, _q, _k, _v, *args, **options: function(module, q, k, v, *args, **options)


def as_in_a_layer(x: Tensor) -> Tensor:
    """[batch, heads, seqlen, head_dim] with the strides of a projection: in memory [batch, seqlen, heads, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
