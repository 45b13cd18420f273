"""A model of transformers that runs in a moment: 3 layers of 4 heads and 2 KV heads."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 4096,
}  # fmt: skip
LENGTH = 500  # of the prompt that most tests have


def llama(**options):
    """The same weights each time, in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, eos_token_id=None, bos_token_id=None, **options)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(length=LENGTH):
    """Tokens (1, length)."""
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(1))


def logits_of(model, implementation, ids, **options):
    """With an implementation of attention, which the model keeps."""
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits
