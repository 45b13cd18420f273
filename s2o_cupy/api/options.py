"""For type checkers: what calls take by name, and what one that returns several things returns.

Nothing here exists while a program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from ..spec import S2OConfig

__all__ = ["OperatorOptions", "Options", "PackedOperatorOptions", "PackedOptions", "PagedOptions"]


class PackedOperatorOptions(TypedDict, total=False):
    """Of every call."""

    tau: float | Sequence[float] | None
    config: S2OConfig | None
    scale: float | None
    softcap: float
    is_causal: bool


class OperatorOptions(PackedOperatorOptions, total=False):
    """Of integrations.torch.attention."""

    layout: Literal["BHSD", "BSHD"]


class PackedOptions(PackedOperatorOptions, total=False):
    """Of s2o_attention_varlen, and of all three functions that take any framework's arrays."""

    out: Any
    stream: Any
    backend: Literal["auto", "cupy", "numpy"]


class Options(PackedOptions, total=False):
    """Of s2o_attention."""

    layout: Literal["BHSD", "BSHD"]


class PagedOptions(PackedOptions, total=False):
    """Of s2o_attention_paged."""

    cu_seqlens_q: Any
    k_scale: Any
    v_scale: Any
    layout: Literal["NHD", "HND"]
