"""S2O inside other software. Each module here imports the framework that it is for; this package imports none.

- :mod:`.torch`: a PyTorch operator, for ``torch.compile`` and ``torch.export``
- :mod:`.drop_in`: the signatures of ``scaled_dot_product_attention`` and ``flash_attn_func``
- :mod:`.transformers`: ``attn_implementation="s2o"`` for Hugging Face models
- :mod:`.jax`: inside of ``jax.jit`` and ``jax.vmap``
- :mod:`.distributed`: prefill over the GPUs of a ``torch.distributed`` group
"""
