"""S2O inside other software. Each module here imports the framework that it is for; this package imports none.

- :mod:`.torch`: a PyTorch operator, for ``torch.compile`` and ``torch.export``
- :mod:`.drop_in`: the signatures of ``scaled_dot_product_attention`` and ``flash_attn_func``
- :mod:`.transformers`: ``attn_implementation="s2o"`` for Hugging Face models
- :mod:`.diffusers`: ``set_attention_backend("s2o")`` for diffusers' models
- :mod:`.vllm`, :mod:`.sglang`: backends for these servers, which they find by the entry points in :mod:`.plugins`
- :mod:`.jax`: inside of ``jax.jit`` and ``jax.vmap``
- :mod:`.distributed`: prefill over the GPUs of a ``torch.distributed`` group
"""
