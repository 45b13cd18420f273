"""Rows on their way between the ranks of a torch.distributed group, and the copies before and after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Exchange", "as_bytes", "exchange", "side_stream", "wait_for", "wide"]

Tensor = Any  # torch.Tensor


class Exchange:
    """Tensors on their way. After `wait` the current stream, or on the CPU the host, has waited for them."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        while self.works:  # each once: gloo would wait for another message
            self.works.pop().wait()


def wait_for(exchanges: Iterable[Exchange]) -> None:
    for one in exchanges:
        one.wait()


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], *, rank: int, group: Any, tag: int) -> Exchange:
    """Start to send ``sent[r]`` to each rank r of ``group`` and to receive what it sends into ``received[r]``, both
    contiguous. What has no element is not sent, nor is this rank's own.

    All at once, so that links are busy in both directions. Behind what the current stream has. All tensors have to be
    kept until they were waited for. ``tag``: exchanges that may be under way together differ.
    """
    ranks, operations = len(sent), []
    with torch.cuda.device_of(sent[0]):  # a batch is of the current device
        for distance in range(1, ranks):
            to, source = (rank + distance) % ranks, (rank - distance) % ranks
            for transfer, x, peer in ((dist.isend, sent[to], to), (dist.irecv, received[source], source)):
                if x.numel():
                    operations.append(dist.P2POp(transfer, as_bytes(x), group=group, tag=tag, group_peer=peer))
        return Exchange(dist.batch_isend_irecv(operations) if operations else [])


def side_stream(device: Any) -> Any:
    """A CUDA stream beside the current one, for what is sent: there it waits for nothing that was launched before. None
    on the CPU, which ``torch.cuda.stream`` takes as well."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def wide(x: Tensor) -> Tensor:
    """The same bytes in elements of 16 if they can be: PyTorch copies rows with gaps between them by elements."""
    each = 16 // x.element_size()
    places = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) != 1 or any(n % each for n in places) or x.data_ptr() % 16:
        return x
    return x.view(torch.complex128)


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's bytes: what every backend can move, whatever the dtype."""
    return x.view(-1).view(torch.uint8)
