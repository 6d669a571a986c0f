"""Worlds of processes: a test marked `on_ranks` runs on every rank of a group at once.

The processes of a world are started once, by the first test that needs them. A test that takes them
longer than a minute hangs: it fails, and they are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

LIMIT = 60
#: Ranks without a GPU are forked by a process that has imported for all of them what they need.
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = ["pytest", "numba", "torch._dynamo", "torch.distributed.tensor", "fusedops.distributed"]


def on_gpus(ranks):
    """Return the world of so many ranks on GPUs, as a parameter of a test."""
    return pytest.param(("nccl", ranks), marks=pytest.mark.gpu2)


#: The backend and the number of ranks.
WORLDS = [("gloo", 2), ("gloo", 3), on_gpus(2), on_gpus(3)]


def device():
    """Return the device of this rank's tensors."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def work(connection, backend, rank, size, store, seconds):
    """Run tests on one rank, as the parent asks for them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # The collector visits what a test makes, not all that was imported for it.
    gc.freeze()
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < size:
            # NCCL lets ranks share a GPU if it takes them for hosts of their own.
            os.environ["NCCL_HOSTID"] = str(rank)
    if backend == "watched":
        # Before a collective, torch compares what all ranks call.
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        "nccl" if backend == "nccl" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            module, name, arguments = connection.recv()
            # A rank that hangs shows where.
            faulthandler.dump_traceback_later(0.9 * LIMIT)
            try:
                torch.manual_seed(0)
                test = getattr(importlib.import_module(module), name)
                connection.send(getattr(test, "on_rank", test)(**arguments))
            except BaseException:
                connection.send(Failure(f"rank {rank}: {traceback.format_exc()}"))
            faulthandler.cancel_dump_traceback_later()
    # An orderly exit may abort while threads of gloo are still at work.
    os._exit(0)


class Failure(str):
    """The traceback of a rank."""


class World:
    """The processes of a group."""

    def __init__(self, backend="gloo", size=2, seconds=LIMIT):
        self.backend, self.size = backend, size
        context = multiprocessing.get_context("spawn" if backend == "nccl" else START)
        if START == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.processes, self.connections = [], []
        for rank in range(size):
            own, other = context.Pipe()
            arguments = other, backend, rank, size, store, seconds
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            other.close()
            self.processes.append(process)
            self.connections.append(own)
        self.answers()

    def answers(self):
        """Return the results of all ranks; a rank that died has a Failure.

        A rank hangs where another one failed, so a test that hangs shows what failed.
        """
        found, hang, end = [], [], time.monotonic() + LIMIT
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                hang.append(rank)
                continue
            try:
                found.append(connection.recv())
            except EOFError:
                found.append(Failure(f"rank {rank} died"))
        if hang:
            self.close()
            failed = [result for result in found if isinstance(result, Failure)]
            pytest.fail("\n".join([f"ranks {hang} of {self.size} hang", *failed]), pytrace=False)
        return found

    def run(self, module, name, **arguments):
        """Run a function on all ranks, and return its results."""
        for connection in self.connections:
            connection.send((module, name, arguments))
        found = self.answers()
        failures = [result for result in found if isinstance(result, Failure)]
        if failures:
            # The group may be out of step now.
            self.close()
            pytest.fail("\n".join(failures), pytrace=False)
        return found

    def close(self):
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []
        self.folder.cleanup()


_open = {}


def world_of(backend, size):
    """Return the world of so many ranks, of which there is one."""
    import torch

    if backend == "nccl" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = _open.get((backend, size))
    if found is None or not found.processes:
        found = _open[backend, size] = World(backend, size)
    return found


def close_all():
    """End the processes of all worlds."""
    for world in _open.values():
        world.close()
    _open.clear()


def on_ranks(test=None, *, worlds=WORLDS):
    """Run a test on every rank of every world."""
    if test is None:
        return functools.partial(on_ranks, worlds=worlds)
    module = Path(inspect.getfile(inspect.unwrap(test))).stem
    parameters = inspect.signature(test).parameters.values()

    def run(world, **arguments):
        world_of(*world).run(module, test.__name__, **arguments)

    run.__name__, run.__doc__, run.on_rank = test.__name__, test.__doc__, test
    run.__module__ = test.__module__
    first = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *parameters])
    return pytest.mark.parametrize("world", worlds, ids=_named)(run)


def _named(world):
    return f"{world[0]}{world[1]}"
