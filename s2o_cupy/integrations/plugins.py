"""Entry points by which serving engines find S2O. Each tells an engine that there is such an attention, by name, and
does nothing else: which attention runs is what the engine is started with."""

from __future__ import annotations

import logging

from .versions import SGLANG, VLLM

__all__ = ["register_with_sglang", "register_with_vllm"]

VLLM_BACKEND = "s2o_cupy.integrations.vllm.S2OBackend"


def register_with_vllm() -> None:
    """For ``vllm.general_plugins``: ``--attention-backend CUSTOM`` is S2O.

    vLLM has one place for a backend that is not its own. If another plug-in has it already, it keeps it.
    """
    log = logging.getLogger("vllm.s2o_cupy")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        taken = custom.is_overridden() and custom.get_path() != VLLM_BACKEND
    except (ImportError, AttributeError) as error:
        log.warning(VLLM.cannot("s2o_cupy", f"this vLLM has no attention that S2O can be put on ({error})"))
        return
    if taken:
        log.warning(
            "s2o_cupy: --attention-backend CUSTOM is %s already; VLLM_PLUGINS=s2o makes it S2O", custom.get_path()
        )
        return
    register_backend(custom, VLLM_BACKEND)


def register_with_sglang() -> None:
    """For ``sglang.srt.plugins``: ``--prefill-attention-backend s2o``."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:  # also of a package that SGLang needs
        log = logging.getLogger("s2o_cupy.integrations.sglang")
        log.warning(SGLANG.cannot("s2o_cupy", f"this SGLang has no attention that S2O can be put on ({error})"))
        return
    if "s2o" not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices(["s2o"])
    register_attention_backend("s2o")(_sglang_backend)


def _sglang_backend(runner: object) -> object:
    from .sglang import make_backend

    return make_backend(runner)
