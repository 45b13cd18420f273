"""SpargeAttn: blocks by their means where their rows are alike (ICML 2025), and values that weigh next to nothing left
out; causal or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..by_head import check_value_skip
from ..errors import ArgumentTypeError, ArgumentValueError
from ..plan.build import Array, Launch, Workspace
from ..problem import Problem
from ..spec import checked_int, names_its_fields
from .base import MethodConfig, Site, Stage, checked_bool, checked_numbers
from .grid import BlockGrid
from .hilbert import token_order
from .kernels import token_order as token_order_kernel
from .stages import BlockMeans, Choice, launch

__all__ = ["SpargeConfig"]

BLOCK_Q, BLOCK_K = 128, 64
LARGEST = 1e30  # theta, either way


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class SpargeConfig(MethodConfig):
    """How SpargeAttn chooses blocks of 64 keys for blocks of 128 queries. Its thresholds are to be tuned for each layer
    or head; there are no defaults. Either ``tau`` or ``topk`` is given.

    Parameters
    ----------
    tau : float, or one for each query head, optional
        The most blocks are chosen whose share of a softmax over the scores of all visible ones does not exceed it: a
        number above 0, up to 1. At 1 all are.
    topk : float, or one for each query head, optional
        The blocks of the highest scores are chosen, as many as this share of all blocks of keys, visible or not, one at
        least: a number above 0, up to 1. So early queries of a causal call see nearly all of theirs.
    theta : float, or one for each query head
        A block of keys, or of queries, whose rows have a smaller mean cosine is not judged by its mean: the keys are
        attended to by all, or the queries attend to all. A finite number; mean cosines are 0 to 1, so that a negative
        one switches the judge off.
    value_skip : float, or one for each query head, optional
        The paper's lambda, a natural logarithm below 0: `Schedule.from_csr` says what it leaves out, and
        ``stats.value_density`` how much. None, the default, and -inf: nothing.
    permutation : (T, H, W), optional
        Without causality: the last T * H * W tokens are those of a grid of this shape, and blocks are of neighbours
        along a Hilbert curve through it. Tokens before them stay. Nothing is moved, and outputs are in place.
    keep_first : bool, default False
        The block of key 0, in that order, is always chosen.
    path : str, default "auto"
        Kernels to attend with, as in `S2OConfig`; the choice does not depend on it.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores; those of one head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.
    """

    tau: float | tuple[float, ...] | None = None
    topk: float | tuple[float, ...] | None = None
    theta: float | tuple[float, ...]
    value_skip: float | tuple[float, ...] | None = None  # type: ignore[misc]  # no class variable here
    permutation: tuple[int, int, int] | None = None
    keep_first: bool = False

    reference: ClassVar[str] = "sparge"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tau is None) == (self.topk is None):
            given = "both given" if self.topk is not None else "both missing"
            raise ArgumentTypeError(f"tau and topk are {given}; accepted: one of them")
        name = "tau" if self.topk is None else "topk"
        self._set(name, checked_numbers(name, getattr(self, name), 0, 1, "a number above 0, up to 1"))
        self._set("theta", checked_numbers("theta", self.theta, -LARGEST, LARGEST, "a finite number"))
        self._set("value_skip", check_value_skip(self.value_skip))
        if self.permutation is not None:
            axes = self.permutation
            if isinstance(axes, (str, bytes)) or not hasattr(axes, "__len__") or len(axes) != 3:
                raise ArgumentTypeError(f"permutation is {axes!r}; accepted: None, or three sizes (T, H, W)")
            sizes = tuple(checked_int(f"permutation[{i}]", n, 1) for i, n in enumerate(axes))
            self._set("permutation", sizes)
        checked_bool("keep_first", self.keep_first)

    @property
    def rule(self) -> str:  # type: ignore[override]  # no class variable here
        return "within" if self.topk is None else "largest"

    @property
    def threshold(self) -> float | tuple[float, ...]:
        found = self.tau if self.topk is None else self.topk
        assert found is not None
        return found

    @property
    def block_q(self) -> int:
        return BLOCK_Q

    def check(self, problem: Problem) -> None:
        for name in ("tau", "topk", "theta", "value_skip"):
            x = getattr(self, name)
            if isinstance(x, tuple) and len(x) != problem.heads:
                raise ArgumentValueError(
                    f"{name} has {len(x)} numbers; accepted: one, or {problem.heads}, one for each head",
                    "SpargeConfig",
                )
        if self.permutation is None:
            return
        if problem.is_causal:
            raise ArgumentValueError(
                "permutation is given and is_causal is True; accepted: is_causal=False", "SpargeConfig"
            )
        tokens = math.prod(self.permutation)
        if problem.seqlen_q != problem.seqlen_k or tokens > problem.seqlen_q:
            raise ArgumentValueError(
                f"permutation has {tokens} tokens, seqlen_q is {problem.seqlen_q} and seqlen_k "
                f"{problem.seqlen_k}; accepted: as many queries as keys, and no fewer than the grid has tokens",
                "SpargeConfig",
            )

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(
            problem.seqlen_q, problem.seqlen_k, BLOCK_Q, BLOCK_K, BLOCK_Q, problem.is_causal, align=BLOCK_K
        )

    @property
    def orders_queries(self) -> bool:
        return self.permutation is not None

    def order_heads(self, problem: Problem) -> int:
        return 1 if self.orders_queries else 0

    def token_order(self, seqlen: int) -> Any:
        """Positions in the order in which blocks take them, int32 [seqlen]."""
        assert self.permutation is not None
        return token_order(self.permutation, seqlen)

    def stages(self, site: Site) -> list[Stage]:
        kv_heads, ordered = site.problem.kv_heads, self.orders_queries
        order: list[Stage] = []
        if ordered:
            order.append(TokenOrder(site, self))
        return [
            *order,
            BlockMeans(site, kv_heads, ordered, ordered, similarity=True, one_order=True),
            Choice(site, kv_heads, self.rule, self.threshold, self.keep_first, self.theta),
        ]


@dataclass(frozen=True)
class TokenOrder:
    """q_order and k_order, the same for all heads."""

    site: Site
    config: SpargeConfig

    @property
    def arrays(self) -> list[Array]:
        return []

    @property
    def tables(self) -> Mapping[str, Any]:
        """What is copied to the GPU once."""
        return {"tokens": self.config.token_order(self.site.problem.seqlen_k)}

    def launches(self, memory: Workspace) -> list[Launch]:
        seqlen, kernel = self.site.problem.seqlen_k, token_order_kernel()
        values = {"seqlen": seqlen, "heads": self.site.heads}
        return [launch(memory, "token_order", kernel, -(-seqlen // kernel.threads), values)]
