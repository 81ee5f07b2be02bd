"""Cubes of ranks without Spark: eight processes over gloo, or one that plays one of many."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from forked import FORKED
from torch.utils._python_dispatch import TorchDispatchMode

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_S = 300.0


def _rank(payload: bytes, rank: int, world_size: int, store: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        answer = cloudpickle.loads(payload)()
        pipe.send((True, cloudpickle.dumps(answer)))
        dist.destroy_process_group()
    except Exception:
        pipe.send((False, traceback.format_exc()))


def run_cube(body: Callable[[], Any], folder: Path, world_size: int = 8) -> list[Any]:
    """Calls a function on every rank at once; returns what it returns, by rank."""
    payload, ranks = cloudpickle.dumps(body), []
    for rank in range(world_size):
        ours, theirs = FORKED.Pipe()
        arguments = (payload, rank, world_size, folder / "store", theirs)
        process = FORKED.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        ranks.append((process, ours))
    try:
        answers = []
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} has not answered within {TIMEOUT_S} s"
            fine, answer = pipe.recv()
            assert fine, f"rank {rank}:\n{answer}"
            answers.append(cloudpickle.loads(answer))
        return answers
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


@contextmanager
def playing_one_of(world_size: int) -> Iterator[None]:
    """This process is rank 0 of so many; its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class MovedBytes(TorchDispatchMode):
    """Counts what this rank receives in collectives: of an all-reduce, as of one in a ring.

    Attributes:
        received: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and isinstance(result, torch.Tensor):
            self.received += _received(func._schema.name.split("::")[1], args, result)
        return result


def _received(name: str, args: Any, result: torch.Tensor) -> float:
    given, got = (each.numel() * each.element_size() for each in (args[0], result))
    if name.startswith("all_gather"):
        return got - given
    if name.startswith("reduce_scatter"):
        return given - got
    if name.startswith("all_reduce"):
        return 2 * got * _others(args[-1])
    if name.startswith("all_to_all"):
        return got * _others(args[-1])
    assert name in ("wait_tensor", "_wrap_tensor_autograd"), name
    return 0


def _others(group: str) -> float:
    """The share of the other ranks of a group."""
    size = dist.distributed_c10d._resolve_process_group(group).size()
    return (size - 1) / size
