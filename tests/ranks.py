"""SequenceParallel in tests, and processes that run their functions: over gloo, or over NCCL with a GPU each."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from conftest import SMALL

MEAN = replace(SMALL, rank="mean")


def parallel(*arguments, **options):
    from s2o_cupy.integrations.distributed import SequenceParallel

    return SequenceParallel(*arguments, **options)


class Ranks:
    """The processes of one group. They start once and run the functions of several tests, as starting takes longest."""

    def __init__(self, world_size, backend, folder):
        import torch.multiprocessing as multiprocessing

        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (rank, world_size, backend, str(folder), there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.pipes.append(here)
        for process in self.processes:
            process.start()

    def run(self, function, folder, *arguments):
        """Raises if a rank does; others may then wait for it, and all are ended."""
        for pipe in self.pipes:
            pipe.send((function, Path(folder), arguments))
        waiting = list(self.pipes)
        while waiting:
            done = wait(waiting, timeout=300)
            errors = [pipe.recv() for pipe in done]
            if not done or any(errors):
                self.end()
                pytest.fail("\n".join(filter(None, errors)) or "ranks wait for each other")
            waiting = [pipe for pipe in waiting if pipe not in done]

    def end(self):
        for process in self.processes:
            process.terminate()
            process.join()

    @property
    def alive(self):
        return all(process.is_alive() for process in self.processes)


def _serve(rank, world_size, backend, folder, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, device_id=device
    )
    while True:
        function, folder, arguments = pipe.recv()
        error = None
        try:
            function(rank, world_size, folder, *arguments)
        except BaseException:
            error = f"rank {rank}: {traceback.format_exc()}"
        pipe.send(error)


RANKS: dict[tuple[str, int], Ranks] = {}  # those that run


@pytest.fixture(scope="module", autouse=True)
def end_of_ranks():
    yield
    while RANKS:
        RANKS.popitem()[1].end()


def run_ranks(function, world_size, folder, *arguments):
    """``function(rank, world_size, folder, *arguments)`` in each process of a group."""
    backend = os.environ.get("S2O_TEST_BACKEND", "gloo")
    ranks = RANKS.get((backend, world_size))
    if ranks is None or not ranks.alive:
        ranks = RANKS[backend, world_size] = Ranks(world_size, backend, folder)
    ranks.run(function, folder, *arguments)
