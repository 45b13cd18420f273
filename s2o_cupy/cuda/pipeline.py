"""The GPU backend: order, pass 1 and pass 2, launched on the current device.

What depends on the problem alone is made once and cached (program.py); a call fills in addresses and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
from cupy.cuda import runtime

from ..arrays.operand import Addresses, Call, Layout, Operands
from ..caches import remembered
from ..plan.device import DeviceLimits
from ..plan.every_tile import every_tile
from ..plan.launch_plan import LaunchPlan
from ..plan.launches import BASES, Launch, Workspace, launches, workspace
from ..problem import Problem
from ..selection.methods import make_plan
from ..spec import Pass, S2OConfig
from . import compiler
from .graphs import GRAPH_LAUNCHES, LAUNCHED
from .program import Program, make_context_current
from .tensor_maps import MapsOfLaunch

__all__ = [
    "Call", "Launched", "Memory", "Prepared", "allocate", "prepared", "run", "run_in_turn", "run_pass1",
    "workspace_bytes", "write_every_tile",
]  # fmt: skip

# Returns the address of so many bytes on the current device and an object that keeps them.
Memory = Callable[[int], tuple[int, Any]]
# Called after each stage with its name and arrays; a tool's way to look inside (diffing, benchmarks).
Observer = Callable[[str, Mapping[str, Any]], None]
# Makes the stream wait until the keys and values before those of the queries are there.
Await = Callable[[], None]


@functools.lru_cache
def device_limits(device: int) -> DeviceLimits:
    """The limits of a device, or S2OError if it cannot run the kernels."""
    capability = int(cupy.cuda.Device(device).compute_capability)
    compiler.check_device(capability, runtime.driverGetVersion(), runtime.runtimeGetVersion())
    return DeviceLimits(
        capability,
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device),
    )


def allocate(nbytes: int) -> tuple[int, Any]:
    """From CuPy's pool, but the graph's own memory while a graph is captured: the pool would give the call's to others
    that the graph's launches then overwrite."""
    if cupy.cuda.get_current_stream().is_capturing():
        with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
            memory = cupy.cuda.alloc(nbytes)
    else:
        memory = cupy.cuda.alloc(nbytes)
    return memory.ptr, memory


class Stages(NamedTuple):
    """What a program launches: `plan.launches`, or another module's functions of these names."""

    workspace: Callable[..., Workspace]
    launches: Callable[..., tuple[Launch, ...]]


CALL = Stages(workspace, launches)
WITHOUT_TAIL = Stages(workspace, functools.partial(launches, adds_tail=False))


COLLECTED = ("keys", "values")  # of a paged cache, arrays in the workspace


class Launched(NamedTuple):
    """What a call did."""

    plan: LaunchPlan
    graphs: str  # S2OStats.graphs

    @property
    def path(self) -> str:
        return self.plan.path

    @property
    def path_reason(self) -> str | None:
        return self.plan.path_reason


def run(
    call: Call, config: S2OConfig | Pass, *, stream: int, memory: Memory = allocate, observe: Observer | None = None,
    await_keys: Await | None = None, taus: int = 0,
) -> Launched:  # fmt: skip
    """Attend. With a Pass it is pass 1 alone. ``stream`` is a handle. ``await_keys`` is called before the first launch
    that reads keys before the queries' own, which may be after pass 1. ``taus``: address of each head's tau, float32
    [batch, heads], of a config with an error. Nothing waits for the GPU. Returns what was launched."""
    return _prepared(call, config).run(call.addresses(taus), stream, memory, observe, await_keys)


def workspace_bytes(operands: Operands, problem: Problem, config: S2OConfig | Pass) -> int:
    """What `run` asks its memory for on the current device; the call is then prepared."""
    return _prepared(Call(operands, 0, 0, problem), config).workspace.nbytes


def run_pass1(call: Call, of_pass: Pass, *, stream: int, memory: Memory = allocate) -> tuple[int, Any]:
    """Pass 1 alone, as in `run`. Returns the address of the state that it leaves, float32 [batch, heads, seqlen_q, 2],
    and what keeps that."""
    found = _prepared(call, of_pass)
    address, keeper = memory(found.workspace.nbytes)
    found.run(call._replace(visited=0).addresses(), stream, lambda nbytes: (address, keeper))
    return address + found.workspace.places["state"].offset, keeper


def run_stages(call: Call, config: S2OConfig, stages: Stages, *, stream: int, memory: Memory, taus: int) -> None:
    """Other launches of a plan for the call's problem; else as in `run`."""
    _prepared(call, config, stages).run(call.addresses(taus), stream, memory)


def run_in_turn(
    calls: Sequence[Call], config: S2OConfig, *, lse_stride: int, stream: int, memory: Memory = allocate
) -> list[Launched]:
    """Run problems one after the other, in one workspace of the largest need.

    The heads of each ``lse`` [batch, heads, seqlen_q] lie ``lse_stride`` elements apart; with a batch there is no gap
    between them. Nothing is launched before all calls are prepared, and nothing waits for the GPU. Returns what was
    launched of each.
    """
    each = [_prepared(call, config) for call in calls]
    workspace_bytes = max(x.workspace.nbytes for x in each)
    # Kernels write a contiguous lse, so one with gaps between its heads is written behind the workspace and copied.
    gaps = [bool(x.lse) and x.problem.heads > 1 and x.problem.seqlen_q != lse_stride for x in calls]
    rows_bytes = [4 * call.problem.seqlen_q for call in calls]
    lse_bytes = max(x.problem.heads * n * gap for x, n, gap in zip(calls, rows_bytes, gaps, strict=True))
    address, keeper = memory(workspace_bytes + lse_bytes)
    shared = lambda nbytes: (address, keeper)  # noqa: E731
    launched = []
    for call, of_call, gap, row in zip(calls, each, gaps, rows_bytes, strict=True):
        lse = address + workspace_bytes if gap else call.lse
        launched.append(of_call.run(call._replace(lse=lse).addresses(), stream, shared))
        if gap:
            runtime.memcpy2DAsync(
                call.lse, 4 * lse_stride, lse, row, row, call.problem.heads, runtime.memcpyDeviceToDevice, stream
            )
    return launched


def prepared(problem: Problem, config: S2OConfig | Pass, layout: Layout) -> Prepared:
    """Calls of one kind on the current device, to be run on any addresses."""
    return _prepare(problem, config, runtime.getDevice(), layout, CALL)


def _prepared(call: Call, config: S2OConfig | Pass, stages: Stages = CALL) -> Prepared:
    return _prepare(call.problem, config, runtime.getDevice(), Layout.of(call.operands, call.paging), stages)


@remembered
def _every_tile(problem: Problem, of_pass: Pass, device: int) -> Program:
    return Program([every_tile(problem, of_pass)], device)


def write_every_tile(visited: int, problem: Problem, of_pass: Pass, stream: int) -> None:
    """To the address ``visited``, int32 of problem.visited_shape(of_pass), what a dense call visits."""
    program = _every_tile(problem, of_pass, runtime.getDevice())
    with program.lock:
        program.params[0]["visited"] = visited
        program.launch(0, stream)


class Prepared:
    """A call of one kind: its plan, its workspace and its launches."""

    def __init__(
        self, problem: Problem, config: S2OConfig | Pass, device: int, layout: Layout, stages: Stages
    ) -> None:
        operands = layout.operands(problem)
        self.problem, self.config = problem, config
        self.plan = make_plan(
            problem, config, device_limits(device), layout.is_aligned(operands), layout.is_compact(operands),
            layout.page_size, layout.is_fp8,
        )  # fmt: skip
        self.workspace: Workspace = stages.workspace(self.plan, problem, config)
        planned = stages.launches(self.plan, problem, config, operands, self.workspace, layout.paging)
        self.program = Program([x for x in planned if x.blocks > 0], device, BASES)
        steps = self.program.launches
        # Whether pass 1 reads no keys but the queries' own. Where they begin inside a unit, it reads the unit's others.
        of_pass, geometry = self.plan.of_pass, self.plan.geometry
        in_whole_units = problem.is_causal and of_pass.window == 0 and geometry.offset % geometry.unit == 0
        self.own_keys_first = in_whole_units and not self.plan.dense
        self.needs_taus = isinstance(config, S2OConfig) and config.error is not None and not self.plan.dense
        # What lies in the workspace where a call has no address of its own for it: its index in BASES, its offset.
        places = self.workspace.places
        own: list[tuple[str, str]] = [(name, name) for name in ("taus", "lse", "visited") if name in places]
        if layout.is_fp8:
            own += zip(("k", "v"), COLLECTED, strict=True)
        self.own = [(BASES.index(name), places[place].offset) for name, place in own]
        # The launches that take tensor maps, and the maps by the addresses of BASES.
        self.mapped = [(i, MapsOfLaunch(step.maps)) for i, step in enumerate(steps) if step.maps]
        assert [i for i, _ in self.mapped] == [i for i, x in enumerate(steps) if x.kernel.family.params.map_bytes]
        self._addresses: tuple[int, ...] = ()  # as of BASES, that parameters and maps have
        self.replays = len(steps) > GRAPH_LAUNCHES
        # A short dense call: no workspace, no taus to check, no graph.
        self.launches_alone = not (self.workspace.nbytes or self.needs_taus or self.replays)
        self._launched = Launched(self.plan, LAUNCHED)

    def run(
        self, at: Addresses, stream: int, memory: Memory | None, observe: Observer | None = None,
        await_keys: Await | None = None,
    ) -> Launched:  # fmt: skip
        """For the arguments see the module's `run`. ``memory`` may be None where the workspace is empty."""
        if self.needs_taus and not at.taus:
            error = getattr(self.config, "error", None)
            raise ValueError(f"S2OConfig: error is {error}, whose taus nobody has found here; accepted: a tau")
        if await_keys is not None and not (self.own_keys_first and observe is None):
            await_keys()
            await_keys = None
        # A short dense call needs none: to allocate and clear it takes the host as long as a launch does.
        address, keeper = memory(self.workspace.nbytes) if memory and self.workspace.nbytes else (0, None)
        launched = self._launched
        with self.program.lock:
            if observe is not None:
                self._begin(at, address, stream)
                self._run_observed(address, keeper, stream, observe)
            elif self.replays and await_keys is None:
                graphs = self.program.replay((*at, address), stream, lambda into: self._launch(at, address, into))
                launched = Launched(self.plan, graphs)
            else:
                self._launch(at, address, stream, await_keys)
        return launched

    def run_again(
        self, arrays: tuple[int, int, int, int], lse: int, stream: int, memory: Callable[[], Memory]
    ) -> None:
        """`run` with the addresses of q, k, v and out and, if it is not 0, of lse. ``memory`` is called where the
        workspace is not empty."""
        if not self.launches_alone:
            at = Addresses.of(arrays, None, lse=lse)
            self.run(at, stream, memory() if self.workspace.nbytes else None)
            return
        with self.program.lock:
            make_context_current()  # also for tensor maps
            self._point_to((*arrays, 0, 0, 0, 0, 0, 0, lse, 0, 0))
            self.program.launch_all(stream)

    def _launch(self, at: Addresses, address: int, stream: int, await_keys: Await | None = None) -> None:
        """Also into a graph, which copies parameters as any launch does: the program is free for other addresses."""
        self._begin(at, address, stream)
        if await_keys is None:
            self.program.launch_all(stream)
            return
        for i, step in enumerate(self.program.launches):
            if await_keys is not None and step.stage != "pass1":
                await_keys()
                await_keys = None
            self.program.launch(i, stream)

    def _begin(self, at: Addresses, address: int, stream: int) -> None:
        """Clear what must be 0, and fill in the addresses. ``address``: of the workspace."""
        if self.workspace.zeroed:
            runtime.memsetAsync(address, 0, self.workspace.zeroed, stream)
        else:
            make_context_current()
        if at.visited:
            if self.plan.dense:
                write_every_tile(at.visited, self.problem, self.plan.of_pass, stream)
            else:
                visited_shape = self.problem.visited_shape(self.plan.of_pass)
                runtime.memsetAsync(at.visited, 0, 4 * math.prod(visited_shape), stream)
        addresses = [*at, address]
        for base, offset in self.own:
            addresses[base] = addresses[base] or address + offset
        self._point_to(tuple(addresses))

    def _point_to(self, addresses: tuple[int, ...]) -> None:
        """Fill in what parameters and tensor maps start from, in the order of BASES."""
        before = self._addresses
        if addresses == before:
            return
        self._addresses = ()  # until all is written: a map may be refused, and an interrupt come between
        self.program.point_to(addresses)
        for i, maps in self.mapped:
            of_maps = maps.pick(addresses)
            if not before or of_maps != maps.pick(before):
                self.program.map_words(i)[:] = maps.words(of_maps)
        self._addresses = addresses

    def _run_observed(self, address: int, keeper: Any, stream: int, observe: Observer) -> None:
        # The device, as a call that needs no memory has no address that tells it.
        memory = cupy.cuda.UnownedMemory(address, self.workspace.nbytes, keeper, runtime.getDevice())

        def view(name: str) -> Any:
            place = self.workspace.places[name]
            return cupy.ndarray(place.shape, place.dtype, cupy.cuda.MemoryPointer(memory, place.offset))

        for i, step in enumerate(self.program.launches):
            self.program.launch(i, stream)
            arrays: dict[str, Any] = {"plan": self.plan, "chunk": step.chunk}
            observe(step.stage, _Views(arrays, view, self.workspace.places))


_prepare = remembered(Prepared)  # packed sequences have many lengths


class _Views(Mapping[str, Any]):
    """``plan``, ``chunk`` and, made when asked for, arrays of the workspace by name."""

    def __init__(self, known: dict[str, Any], view: Callable[[str], Any], names: Mapping[str, Any]) -> None:
        self.known, self.view, self.names = known, view, names

    def __getitem__(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        if name not in self.names:
            raise KeyError(name)
        return self.view(name)

    def __iter__(self) -> Any:
        return iter((*self.known, *self.names))

    def __len__(self) -> int:
        return len(self.known) + len(self.names)
