"""The retrieval model in PyTorch alone, to train it: a Llama, its weights by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from loader import HEADS, KV_HEADS, ROPE_THETA

HEAD_DIM = 64  # unless weights have another
NORM_EPS = 1e-5
SMALL = 0.1  # so that what layers add at first is no larger than embeddings are
Tensor = Any  # torch.Tensor
MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")


def initial(
    vocabulary: int, hidden: int, layers: int, intermediate: int, seed: int, head_dim: int = HEAD_DIM
) -> dict[str, Tensor]:
    """Weights to begin with, in float32, on the CPU: random, but for what saves most of the steps to heads that copy.

    The heads of the first layer look at the token 1, 2, 3 or 4 before (`offsets`), by a part that all embeddings have
    in common. In the later layers what a head reads of a token makes the same token likelier to come next.
    """
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=draw)  # noqa: E731
    group = HEADS // KV_HEADS
    common = hidden**-0.5 * torch.ones(hidden)
    weights = {"model.embed_tokens.weight": 0.05 * (normal(vocabulary, hidden) + 0.7)}
    for layer in range(layers):
        q, o = normal(HEADS * head_dim, hidden) * hidden**-0.5, normal(hidden, HEADS * head_dim) * hidden**-0.5
        k, v = (normal(KV_HEADS * head_dim, hidden) * hidden**-0.5 for _ in range(2))
        gate, up = (normal(intermediate, hidden) * hidden**-0.5 for _ in range(2))
        if layer == 0:
            queries, key = offsets(head_dim)
            q, k = 0.1 * q + queries[:, None] * common, 0.1 * k + key.repeat(KV_HEADS)[:, None] * common
        else:
            v -= (v @ common)[:, None] * common  # what all tokens have in common is nothing to copy
            copied = v.view(KV_HEADS, 1, head_dim, hidden).expand(-1, group, -1, -1).reshape(-1, hidden)
            o = 3 * copied.T / group**0.5
        down = normal(hidden, intermediate) * intermediate**-0.5
        for name, weight in zip(MATRICES, (q, k, v, SMALL * o, gate, up, SMALL * down), strict=True):
            weights[f"model.layers.{layer}.{name}.weight"] = weight
        for name in NORMS:
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    return weights | {"model.norm.weight": torch.ones(hidden)}


def offsets(head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries [HEADS * head_dim] and a key [head_dim] whose scores are highest 1, 2, 3 or 4 tokens back."""
    angles = ROPE_THETA ** -(torch.arange(0, head_dim, 2) / head_dim)
    size = torch.where(angles > 0.02, 2.5, 0.5)  # pairs that turn fast tell neighbours apart
    turns = (1 + torch.arange(HEADS) % 4)[:, None] * angles
    queries = torch.cat([turns.cos() * size, -turns.sin() * size], 1)
    return queries.reshape(-1), torch.cat([size, torch.zeros_like(size)])


def rotary(positions: Tensor, dtype: Any, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, 1, length, head_dim], rounded to the dtype as transformers rounds them."""
    powers = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * ROPE_THETA**-powers
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, NORM_EPS)


def attended(x: Tensor, cos: Tensor, sin: Tensor, norms: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """q [rows, HEADS, length, head_dim], k and v [rows, KV_HEADS, length, head_dim] of a layer, rotated."""
    h = norm(x, norms[0])
    q, k, v = (
        F.linear(h, w).view(*x.shape[:2], -1, len(w) // n).transpose(1, 2)
        for w, n in zip(matrices, (HEADS, KV_HEADS, KV_HEADS), strict=False)
    )
    return [rotated(q, cos, sin), rotated(k, cos, sin), v]


def layer(x: Tensor, cos: Tensor, sin: Tensor, norms: list[Tensor], matrices: list[Tensor]) -> Tensor:
    rows, length, _ = x.shape
    wo, gate, up, down = matrices[3:]
    q, k, v = attended(x, cos, sin, norms, matrices)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(o.transpose(1, 2).reshape(rows, length, -1), wo)
    h = norm(x, norms[1])
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def hidden_states(
    weights: Mapping[str, Tensor], ids: Tensor, positions: Tensor, dtype: Any, one_layer: Any = layer
) -> Tensor:
    """[rows, length, hidden] behind the last norm, computed in ``dtype`` throughout, as transformers does."""
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    head_dim = len(cast["model.layers.0.self_attn.q_proj.weight"]) // HEADS
    cos, sin = rotary(positions, dtype, head_dim)
    x = F.embedding(ids, cast["model.embed_tokens.weight"])
    for i in range(sum(name.endswith("q_proj.weight") for name in cast)):
        part = lambda names: [cast[f"model.layers.{i}.{name}.weight"] for name in names]  # noqa: B023, E731
        x = one_layer(x, cos, sin, part(NORMS), part(MATRICES))
    return norm(x, cast["model.norm.weight"])


def logits(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    return F.linear(hidden, weights["model.embed_tokens.weight"].to(hidden.dtype))


def qkv_by_layer(weights: Mapping[str, Tensor], ids: Tensor, dtype: Any) -> list[list[Tensor]]:
    """`attended` of each layer, for ids [rows, length]."""
    found = []

    def one_layer(*args: Any) -> Tensor:
        found.append(attended(*args))
        return layer(*args)

    with torch.no_grad():
        hidden_states(weights, ids, torch.arange(ids.shape[1], device=ids.device)[None], dtype, one_layer)
    return found
