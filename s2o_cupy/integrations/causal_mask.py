"""A causal mask that takes no memory until something computes with it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CausalMask", "Sequences"]

Sequences = tuple[tuple[int, int, int], ...]  # (row of the batch, first key, one behind the last key), ascending


class CausalMask(torch.Tensor):  # type: ignore[misc]
    """Stands for a bool mask (batch, 1, seqlen_q, seqlen_k), True where a query may see a key.

    The last query sees the first ``keys`` keys, each query before it one less; what is behind them (free places of a
    static cache) no query sees. With ``window`` a query sees the last so many of its keys, itself among them. With
    ``sequences`` it sees keys of its own sequence alone, and a query outside of all of them those of any. At 100,000
    queries and keys the mask itself would be 10 GB. It has its shape, dtype and device, and may move to another device;
    any other operation makes the mask and computes with that. But torch.vmap and torch.tensor read it as all False,
    nothing visible: give them .make().
    """

    keys: int
    window: int | None
    sequences: Sequences | None

    @staticmethod
    def __new__(
        cls, batch: int, seqlen_q: int, seqlen_k: int, keys: int, device: Any, window: int | None = None,
        sequences: Sequences | None = None,
    ) -> CausalMask:  # fmt: skip
        # What went past __torch_function__ would read this one element: nothing is visible.
        element = torch.zeros((), dtype=torch.bool, device=device)
        mask = torch.Tensor._make_subclass(cls, element.expand(batch, 1, seqlen_q, seqlen_k))
        mask.keys, mask.window, mask.sequences = keys, window, sequences
        return mask

    def make(self) -> Any:
        """The mask as an ordinary tensor."""
        batch, _, seqlen_q, seqlen_k = self.shape
        rows = torch.arange(self.keys - seqlen_q, self.keys, device=self.device)[:, None]
        positions = torch.arange(seqlen_k, device=self.device)
        visible = positions <= rows  # [seqlen_q, seqlen_k]
        if self.window is not None:
            visible &= positions > rows - self.window
        if self.sequences is not None:
            of_keys = torch.full((batch, seqlen_k), -1)  # the number of a key's sequence
            for i, (row, begin, end) in enumerate(self.sequences):
                of_keys[row, begin:end] = i
            of_keys = of_keys.to(self.device)
            of_queries = of_keys[:, self.keys - seqlen_q : self.keys, None]
            of_keys = of_keys[:, None]
            visible = visible & (of_keys >= 0) & ((of_keys == of_queries) | (of_queries < 0))
            return visible[:, None]
        return visible.expand(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _KNOWN or (func.__name__ == "__get__" and func not in _VIEWS):
                return func(*args, **kwargs)
            if func in _SAME:
                return args[0]
            if func is torch.Tensor.to:
                device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
                if dtype in (None, torch.bool):
                    return args[0]._on(device)
            writes = func is torch.Tensor.__setitem__ or (func.__name__[-1] == "_" and func.__name__[-2:] != "__")
            if (writes and isinstance(args[0], cls)) or isinstance(kwargs.get("out"), cls):
                raise TypeError(f"CausalMask: {func.__name__} would write to a mask that is not in memory; use .make()")
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.make, (args, kwargs))
            return func(*args, **kwargs)

    def _on(self, device: Any) -> CausalMask:
        if device in (None, self.device):
            return self
        batch, _, seqlen_q, seqlen_k = self.shape
        return CausalMask(batch, seqlen_q, seqlen_k, self.keys, device, self.window, self.sequences)


# What is known without a mask in memory. Any getter but those of views of the data is.
_KNOWN = tuple(
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "stride", "storage_offset", "is_contiguous", "is_floating_point", "_is_view")
)
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag"))
_SAME = (torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.detach)  # as nothing writes to it
