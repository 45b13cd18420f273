"""S2O inside other software. Each module here imports the framework that it is for; this package imports none.

- :mod:`.torch`: a PyTorch operator, for ``torch.compile`` and ``torch.export``
- :mod:`.torch_gather`: the same of ``gather_attention``
- :mod:`.drop_in`: the signatures of ``scaled_dot_product_attention`` and ``flash_attn_func``
- :mod:`.transformers`: ``attn_implementation="s2o"`` for Hugging Face models
- :mod:`.model_tools`: such models tuned by layer and head, and reported on
- :mod:`.diffusers`: ``set_attention_backend("s2o")`` for diffusers' models
- :mod:`.vllm`, :mod:`.sglang`: backends for these servers, which they find by the entry points in :mod:`.plugins`
- :mod:`.jax`: inside of ``jax.jit`` and ``jax.vmap``
- :mod:`.distributed`: prefill over the GPUs of a ``torch.distributed`` group
- :mod:`.nsa`: NSA with gradients
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["MODULES", "modules_with"]

MODULES = (  # for users; the others are theirs
    "diffusers", "distributed", "drop_in", "jax", "model_tools", "nsa", "sglang", "torch", "torch_gather",
    "transformers", "vllm",
)  # fmt: skip


def modules_with(name: str) -> list[str]:
    """Those of MODULES that have a public name. They are read and not imported, as each needs its framework."""
    return [module for module in MODULES if name in _public_names(module)]


@functools.cache
def _public_names(module: str) -> list[str]:
    try:
        text = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    except OSError:  # installed without sources
        return []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
