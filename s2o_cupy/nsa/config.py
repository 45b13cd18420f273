"""How NSA chooses blocks of keys, in numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from ..errors import ArgumentValueError
from ..spec import Pass, check_path, checked_int, names_its_fields

__all__ = ["LEAST", "NSAConfig"]

LEAST = {
    "block": 1, "top": 1, "first": 0, "local": 1, "window": 1, "length": 1, "stride": 1, "workspace_bytes": 1 << 20
}  # fmt: skip


@names_its_fields
@dataclass(frozen=True)
class NSAConfig:
    """How NSA chooses blocks of keys, and what its other branches see.

    Parameters
    ----------
    block : int, default 64
        Keys of a block. The GPU takes 64 and 128.
    top : int, default 16
        Blocks that a token attends to, all that there are where there are fewer. The GPU takes up to 32.
    first : int, default 1
        Of these always the first blocks,
    local : int, default 2
        and the token's own block and those just before it, so many in all.
    window : int, default 512
        Latest keys of the window branch, the token's own among them.
    length : int, default 32
        Keys behind a compressed one. The GPU takes ``stride`` and twice that.
    stride : int, default 16
        Keys from the beginning of one compressed key to that of the next; divides ``length`` and ``block``. The GPU
        takes a fourth, an eighth and a sixteenth of a block.
    workspace_bytes : int, default 1 GiB
        Bound on the GPU memory that blocks' weights and, after them, parts of the selected branch take: tokens are
        taken in rounds.
        A round of 128 tokens always fits.
    path : str, default "auto"
        As in `S2OConfig`. On "hopper" too, portable kernels take the selected branch with blocks of 128, and the
        blocks' weights with more than 8 query heads of a KV head.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.

    Notes
    -----
    Source: Native Sparse Attention (Yuan et al. 2025). Its other setting is ``block=128, top=8``.
    """

    block: int = 64
    top: int = 16
    first: int = 1
    local: int = 2
    window: int = 512
    length: int = 32
    stride: int = 16
    workspace_bytes: int = 1 << 30
    path: str = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "path":
                value = checked_int(field.name, getattr(self, field.name), LEAST[field.name])
                object.__setattr__(self, field.name, value)
        for name in ("length", "block"):
            if getattr(self, name) % self.stride:
                raise ArgumentValueError(
                    f"{name} is {getattr(self, name)} with stride {self.stride}; accepted: a multiple of it"
                )
        if self.first + self.local > self.top:
            raise ArgumentValueError(
                f"top is {self.top} with first {self.first} and local {self.local}; accepted: no fewer than "
                "those two together, which are always chosen"
            )
        check_path(self.path)

    @functools.cached_property
    def of_pass(self) -> Pass:
        """What the passes read for the compressed branch, which is dense attention."""
        return Pass(path=self.path)
