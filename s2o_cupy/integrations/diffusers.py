"""S2O in diffusers: ``transformer.set_attention_backend("s2o")``.

S2O takes attention among many tokens, as of the transformers that make long videos and large images; it is not causal
there. Everything else goes to the native backend, scaled_dot_product_attention. Importing this imports diffusers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..extras import with_extra

with with_extra(__name__, "diffusers"):  # whose extra has PyTorch, too
    import diffusers  # noqa: F401
    import torch  # noqa: F401

from ..api.habits import answers_habits
from ..api.run import parse_config
from ..spec import MAX_HEAD_DIM, S2OConfig
from .autocast import to_autocast_dtype
from .fallbacks import CallCounts, Kinds, why_not_tensors
from .model_arguments import check_is_no_method, check_min_seqlen
from .torch import attention
from .versions import DIFFUSERS, warn_if_newer

try:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
except ImportError as error:
    raise ImportError(DIFFUSERS.cannot(__name__, error)) from error

__all__ = ["S2OBackend", "register"]

Tensor = Any  # torch.Tensor

# Of those first nobody is warned: the native backend is meant to take such calls.
_EXPECTED = {
    "short": "fewer keys than min_seqlen, as of a prompt's text",
    "few queries": "fewer queries than block_m",
    "dropout": "dropout, as in training",
}
_UNEXPECTED = {
    "mask": "a mask, as of padding in a prompt's text",
    "causal": "causal attention with more queries than keys, or fewer",
    "shape": "head_dim above 256, or values of another head_dim",
    "device or dtype": "S2O takes float16 and bfloat16 on an NVIDIA GPU, and float32 and float64 too on the CPU",
    "gradients": "gradients are enabled; call the model under torch.no_grad() or torch.inference_mode()",
    "context parallel": "diffusers spreads a sequence over several GPUs",
}
KINDS = Kinds(
    "s2o_cupy.integrations.diffusers", "the native backend", _EXPECTED, _UNEXPECTED, {"s2o": "S2O"},
    frozenset({"short", "few queries"}),
    "no calls: no model has run with this backend yet (model.set_attention_backend)",
)  # fmt: skip


@answers_habits
def register(
    name: str = "s2o", config: S2OConfig | None = None, min_seqlen: int = 8192, *,
    tau: float | Sequence[float] | None = None,
) -> S2OBackend:  # fmt: skip
    """Make S2O an attention backend of diffusers, under ``name``.

    A model takes it by ``model.set_attention_backend(name)``, a block of code by ``attention_backend(name)`` of
    ``diffusers.models.attention_dispatch``. diffusers' list of backends is not made to be extended, so a version may
    refuse; this one was tested with 0.42.

    Parameters
    ----------
    name : str, default "s2o"
        Registering a name again replaces what it stood for, also in models that use it.
    config : S2OConfig, optional
        Of all calls. With taus: an error is not accepted, as attention here is not causal.
    min_seqlen : int, default 8192
        With fewer keys than this the native backend runs. With more, up to ``dense_up_to``, S2O's dense kernels do, as
        ordering keys would cost more than it saves.

    tau : float or sequence of float, optional
        Overrides ``config.tau`` and ``config.error``.

    Returns
    -------
    S2OBackend
        What was registered. Its ``calls`` counts what ran, and why S2O did not; ``report()`` says it in words.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what came and what is accepted.

    Examples
    --------
    >>> from s2o_cupy import S2OConfig
    >>> from s2o_cupy.integrations.diffusers import register  # doctest: +SKIP
    >>> s2o = register("s2o", S2OConfig(tau=0.02))  # doctest: +SKIP
    >>> pipe.transformer.set_attention_backend("s2o")  # doctest: +SKIP
    """
    known = AttentionBackendName._value2member_map_.get(name) if isinstance(name, str) else None
    taken = known is not None and not isinstance(_AttentionBackendRegistry._backends.get(known), S2OBackend)
    if taken or not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"register: name is {name!r}; accepted: small letters, digits and '_', and not a name that diffusers has "
            "given already"
        )
    check_is_no_method("register", name, takes_methods=False)
    check_min_seqlen("register", min_seqlen)
    warn_if_newer(DIFFUSERS, KINDS.log)
    config = parse_config(config, tau, "register")
    if config.error is not None:
        raise ValueError(
            f"register: config.error is {config.error}, for which attention must be causal, as here it is not; "
            "accepted: a tau, or one for each query head"
        )
    backend = S2OBackend(config, min_seqlen)
    _AttentionBackendRegistry.register(known or _new_name(name))(backend)
    return backend


def _new_name(name: str) -> Any:
    """A further member of the enumeration by which diffusers looks backends up."""
    names: Any = AttentionBackendName
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    setattr(names, name.upper(), member)
    names._member_map_[name.upper()] = member
    names._member_names_.append(name.upper())
    names._value2member_map_[name] = member
    return member


class S2OBackend:
    """An attention function for diffusers: S2O where it can and pays, the native backend for everything else.

    Attributes
    ----------
    calls : collections.Counter
        How often "s2o" ran, and each reason why it did not, in compiled graphs too. The log says each reason once.
    """

    def __init__(self, config: S2OConfig, min_seqlen: int) -> None:
        self.config = config
        self.min_seqlen = min_seqlen
        words = KINDS.expected | {"short": f"fewer keys than min_seqlen, {min_seqlen:,}, as of a prompt's text"}
        self._counts = CallCounts(replace(KINDS, expected=words))

    @property
    def calls(self) -> Counter[str]:
        return self._counts.calls

    def report(self) -> str:
        """A line for each kind of call, the most frequent first: how many, of which kind, and what that means."""
        return self._counts.report()

    def __call__(
        self,
        query: Tensor,  # [batch, seqlen_q, heads, head_dim]
        key: Tensor,  # [batch, seqlen_k, kv_heads, head_dim]
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:  # like query
        reason = self._why_not(query, key, value, attn_mask, dropout_p, is_causal, _parallel_config)
        self._counts.add(reason or "s2o")
        if reason is None:
            q, k, v = to_autocast_dtype(query, key, value)
            return attention(q, k, v, config=self.config, scale=scale, is_causal=is_causal, layout="BSHD")
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return native(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, _parallel_config=_parallel_config,
        )  # fmt: skip

    def _why_not(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        parallel: Any,
    ) -> str | None:  # fmt: skip
        """Why a call is not S2O's, one of KINDS, or None."""
        seqlen_q, seqlen_k = query.shape[1], key.shape[1]
        if seqlen_k < self.min_seqlen:
            return "short"
        if seqlen_q < self.config.block_m:
            return "few queries"
        if mask is not None:
            return "mask"
        if causal and seqlen_q != seqlen_k:  # the native backend aligns them top-left
            return "causal"
        if parallel is not None:
            return "context parallel"
        if not query.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM:
            return "shape"
        return why_not_tensors(query, key, value, dropout)
