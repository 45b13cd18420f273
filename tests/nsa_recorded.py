"""Calls of NSA on a CUDA that takes notes of launches, clears and events."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from nsa_cases import SMALL, Arrays, draw
from pretended import Launched, record_launches

from s2o_cupy.arrays.operand import Operand
from s2o_cupy.caches import clear_cache
from s2o_cupy.nsa.plan import make_plan
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.problem import Problem

STREAM, GRAPH = 7, 8  # the caller's, and one that is captured
ROUNDS = replace(SMALL, workspace_bytes=1 << 20)  # several, in short sequences
WEIGHTS = ("nsa_block_weights", "nsa_compressed")
OF_BLOCKS = ["nsa_count", "nsa_totals", "nsa_places", "nsa_scatter"]


class Cleared(NamedTuple):
    address: int
    value: int
    nbytes: int
    stream: int


class Event(NamedTuple):
    number: int
    stream: int
    waits: bool  # the stream for the event, which else is recorded there


class Cuda(NamedTuple):
    notes: list[Any]  # Launched, Cleared and Event
    keys: list[Any]  # by which graphs are known

    def launched(self, *roles: str) -> list[Launched]:
        found = [x for x in self.notes if isinstance(x, Launched)]
        return [x for x in found if not roles or x.kernel.role in roles]


@pytest.fixture
def install(monkeypatch):
    """install(compute_capability, captured) -> notes of what follows. ``captured``: every call goes into a graph."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import pipeline, program
    from s2o_cupy.nsa import backward_launches, launches

    def start(compute_capability: int, captured: bool = False) -> Cuda:
        clear_cache()
        notes: list[Any] = record_launches(monkeypatch, compute_capability, pipeline, launches, backward_launches)
        cuda, numbers = Cuda(notes, []), itertools.count(100)
        runtime = SimpleNamespace(
            getDevice=lambda: 0, streamGetPriority=lambda stream: 0,
            memsetAsync=lambda *clears: notes.append(Cleared(*clears)),
            eventRecord=lambda event, stream: notes.append(Event(event, stream, False)),
            streamWaitEvent=lambda stream, event: notes.append(Event(event, stream, True)),
        )  # fmt: skip
        for module in (pipeline, launches, backward_launches):
            monkeypatch.setattr(module, "runtime", runtime)
        stream = lambda *, non_blocking, priority: SimpleNamespace(ptr=next(numbers) * non_blocking)  # noqa: E731
        event = lambda *, disable_timing: SimpleNamespace(ptr=next(numbers))  # noqa: E731
        monkeypatch.setattr(launches, "cupy", SimpleNamespace(cuda=SimpleNamespace(Stream=stream, Event=event)))

        def run(key, stream, launch):
            cuda.keys.append(key)
            launch(GRAPH if captured and stream == STREAM else stream)

        monkeypatch.setattr(program, "GraphCache", lambda cuda: SimpleNamespace(run=run))
        return cuda

    yield start
    clear_cache()


class Case(NamedTuple):
    """A call of nsa_attention, whose arrays are there."""

    x: Arrays
    near: Arrays  # whose keys and values the window has
    problem: Problem
    config: Any
    capability: int
    out: np.ndarray
    memory: np.ndarray
    asked: list[int]  # bytes

    @classmethod
    def make(cls, heads=(4, 2), lengths=(701, 701), config=ROUNDS, capability=90, batch=2, shares=True):
        rng = np.random.default_rng(3)
        like = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "config": config}
        x, near = (draw(rng, np.float16, *lengths, **like) for _ in range(2))
        x = x._replace(q=np.ascontiguousarray(x.q.swapaxes(1, 2)).swapaxes(1, 2))  # tokens before heads
        problem = Problem(batch, *heads, *lengths, 64, "float16", True, 0.125)
        memory = np.full(1 << 24, 255, np.uint8)  # NaN in all that nobody writes
        return cls(x, x if shares else near, problem, config, capability, np.zeros_like(x.q), memory, [])

    @property
    def plan(self):
        """As the call has it."""
        return make_plan(
            self.problem, self.config, DeviceLimits.of_architecture(self.capability), where="nsa_attention",
            compresses=True, attends=True, gates=True, shares=self.near is self.x,
        )  # fmt: skip

    @property
    def address(self):
        return self.memory.ctypes.data

    def give(self, nbytes):
        assert nbytes <= self.memory.nbytes
        self.asked.append(nbytes)
        return self.address, self.memory

    def attend(self, observe=None):
        from s2o_cupy.nsa.launches import Branches, Gates, Pair, attend

        x, near = self.x, self.near
        k, v, k_cmp, v_cmp, k_win, v_win = (operand(a) for a in (x.k, x.v, x.k_cmp, x.v_cmp, near.k, near.v))
        gates = Gates(x.gates.ctypes.data, tuple(s // 4 for s in x.gates.strides[:3]), True)
        branches = Branches(Pair(k, v), Pair(k_cmp, v_cmp), Pair(k_win, v_win), gates)
        attend(operand(x.q), branches, operand(self.out), self.problem, self.config, stream=STREAM,
               memory=self.give, observe=observe)  # fmt: skip


def operand(x: np.ndarray) -> Operand:
    batch, head, row = (s // 2 for s in x.strides[:3])
    return Operand(x.ctypes.data, x.shape, (batch, head, row))


def points_to(tensor: Any, x: np.ndarray) -> bool:
    """Whether a kernel's tensor is this array."""
    return tuple(tensor) == (x.ctypes.data, *(s // 2 for s in x.strides[:3]))


def of_pass1(x: Launched) -> Any:
    """Attention's parameters."""
    return x.params["attention"] if "attention" in x.params.dtype.names else x.params


def before(notes: list[Any]) -> dict[int, set[int]]:
    """Of each launch, by its number among the notes, those that are over when it begins."""
    of_stream: dict[int, set[int]] = defaultdict(set)
    of_event: dict[int, set[int]] = {}
    found = {}
    for i, x in enumerate(notes):
        if not isinstance(x, Event):
            found[i] = set(of_stream[x.stream])
            of_stream[x.stream].add(i)
        elif x.waits:
            of_stream[x.stream] |= of_event[x.number]
        else:
            of_event[x.number] = set(of_stream[x.stream])
    return found
