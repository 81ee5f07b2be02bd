"""Rounds over gloo: with the driver as a third rank, or as one bare all-reduce of the workers."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from round_processes import RoundProcesses


@contextmanager
def rounds(workers: int, numel: int, *, driver: bool) -> Iterator[RoundProcesses]:
    """Starts the workers, each in a process of its own.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        driver: whether a rank of the driver takes part in reduce and broadcast; otherwise the
            workers reduce among themselves.
    """
    ranks = workers + driver
    expected = (workers + 1) / 2 if driver else sum(range(workers))
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, workers, numel, f"file://{folder}/gloo"
        with RoundProcesses(member, ranks, given, expected=expected) as processes:
            yield processes


def member(
    rank: int, ranks: int, workers: int, numel: int, meeting: str
) -> tuple[Callable[[], object], torch.Tensor]:
    """Returns what a rank does in a round, and what it contributes; ``meeting`` is a URL."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    vector = torch.empty(numel)
    if ranks == workers:
        return partial(dist.all_reduce, vector), vector
    return partial(_take_part, rank, workers, vector), vector


def _take_part(rank: int, workers: int, vector: torch.Tensor) -> None:
    # The driver's rank is 0, so that it only adds up.
    dist.reduce(vector, dst=0)
    if rank == 0:
        vector.div_(workers)
    dist.broadcast(vector, src=0)
