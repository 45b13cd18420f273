"""The one place that launches kernels.

A program is a sequence of prepared launches. What depends on the problem alone is filled into their parameters when the
program is made. A call fills in its addresses and launches. A call that comes again with the same addresses is
replayed as a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..plan.build import Launch, added_to_addresses
from . import compiler
from .graphs import GraphCache

__all__ = ["Program", "make_context_current"]

STRUCT_BYTES = 64  # a parameter struct begins on a multiple of these, as tensor maps do
WORD_BYTES = 8
WORD = 2**64  # at which addresses wrap around
FEW_POINTERS = 16  # up to so many are written one by one: NumPy takes as long as for 20


class Program:
    """Launches in order, whose parameters lie one behind the other in one buffer.

    Parameters
    ----------
    launches : sequence of Launch
        Launches that are given the same ``params`` object share one struct.
    device : int, the current device
    bases : sequence of str
        The addresses that a call names with `point_to`, in this order. Pointers of a launch start from them. Without
        bases a call fills in all pointers by name (``params``).

    One program serves all threads. A caller holds ``lock`` from the first change of a parameter to the last launch.
    """

    def __init__(self, launches: Sequence[Launch], device: int, bases: Sequence[str] = ()) -> None:
        functions = compiler.load_all([x.kernel for x in launches], device)
        self.launches = tuple(launches)
        begins: dict[int, int] = {}  # of each struct, by the object that it comes from
        nbytes = 0
        for x in launches:
            if id(x.params) not in begins:
                begins[id(x.params)] = nbytes
                nbytes += -(-x.params.nbytes // STRUCT_BYTES) * STRUCT_BYTES
        self.buffer = np.zeros(nbytes // WORD_BYTES, np.uint64)
        places = [begins[id(x.params)] for x in launches]
        # Of each launch the struct, to fill in by name.
        self.params: list[Any] = [
            np.ndarray((), x.params.dtype, self.buffer, place) for x, place in zip(launches, places, strict=True)
        ]
        of_bytes = self.buffer.view(np.uint8)
        pointers: list[tuple[int, int, int]] = []  # word of the buffer, base, bytes from the base
        for x, place in zip(launches, places, strict=True):
            of_bytes[place : place + x.params.nbytes] = np.frombuffer(x.params.tobytes(), np.uint8)
            for offset, base, further in x.pointers if bases else ():
                pointers.append(((place + offset) // WORD_BYTES, bases.index(base), further))
        self._few = pointers if len(pointers) <= FEW_POINTERS else None
        self._words_to_write: Any = self.buffer.data  # one by one faster than through NumPy
        words, of_base, further_bytes = zip(*pointers, strict=True) if pointers else ((), (), ())
        self._words, self._bases = np.array(words, np.intp), np.array(of_base, np.intp)
        self._further = added_to_addresses(further_bytes)
        self._addresses: tuple[int, ...] = ()  # those that are in the buffer
        # A launch is given the address of its struct, which stands in an array of its own.
        self._structs = np.array([self.buffer.ctypes.data + place for place in places], np.uint64)
        first = self._structs.ctypes.data
        self._launches = [
            (function.ptr, x.blocks, x.kernel.threads, x.kernel.shared_bytes, first + WORD_BYTES * i)
            for i, (x, function) in enumerate(zip(launches, functions, strict=True))
        ]
        self.lock = threading.RLock()
        self._graphs = GraphCache(cupy.cuda)

    def point_to(self, addresses: tuple[int, ...]) -> None:
        """Fill in what the pointers start from, in the order of ``bases``."""
        if addresses == self._addresses:
            return
        self._addresses = ()  # until all are written: an interrupt may come between
        if self._few is None:
            self.buffer[self._words] = np.array(addresses, np.uint64)[self._bases] + self._further
        else:
            for word, base, further in self._few:
                self._words_to_write[word] = (addresses[base] + further) % WORD
        self._addresses = addresses

    def map_words(self, i: int) -> Any:
        """The tensor maps with which the parameters of launch ``i`` begin, uint64, to write."""
        place = (int(self._structs[i]) - self.buffer.ctypes.data) // WORD_BYTES
        return self.buffer[place : place + self.launches[i].kernel.family.params.map_bytes // WORD_BYTES]

    def launch_all(self, stream: int) -> None:
        """Enqueue every launch, in order, with its parameters as they are now."""
        for function, blocks, threads, shared_bytes, struct in self._launches:
            driver.launchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, struct, 0)

    def launch(self, i: int, stream: int, blocks: int | None = None) -> None:
        """Enqueue launch ``i`` with its parameters as they are now, which are copied. ``blocks``: where they are not
        those that it was made with."""
        function, planned, threads, shared_bytes, struct = self._launches[i]
        blocks = planned if blocks is None else blocks
        driver.launchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, struct, 0)

    def replay(self, key: tuple[int, ...], stream: int, launch: Callable[[int], None]) -> str:
        """``launch(stream)``, as a graph once it has come with the same ``key``: all numbers that its launches hold.
        Returns S2OStats.graphs."""
        return self._graphs.run(key, stream, launch)


def make_context_current() -> None:
    """Before a launch that nothing of the runtime goes before: driver calls do not do it, in a thread's first call."""
    if not driver.ctxGetCurrent():
        runtime.setDevice(runtime.getDevice())
