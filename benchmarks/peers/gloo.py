"""Rounds over gloo: with the driver as a third rank, or as one bare all-reduce of the workers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from round_processes import RoundProcesses


def with_driver(workers: int, numel: int, folder: Path) -> RoundProcesses:
    """Starts the driver's rank, which takes part in reduce and broadcast, and the workers.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        folder: an empty folder through which the ranks find each other.

    Returns:
        The processes, to be closed by leaving their ``with`` block.
    """
    # The driver's rank is 0, so that it only adds up.
    given = (workers + 1, workers, numel, folder)
    return RoundProcesses(_member, workers + 1, given, expected=(workers + 1) / 2)


def among_workers(workers: int, numel: int, folder: Path) -> RoundProcesses:
    """Starts the workers, which reduce among themselves; arguments and result as above."""
    given = (workers, workers, numel, folder)
    return RoundProcesses(_member, workers, given, expected=sum(range(workers)))


def _member(
    rank: int, ranks: int, workers: int, numel: int, folder: Path
) -> tuple[Callable[[], object], torch.Tensor]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=ranks
    )
    vector = torch.empty(numel)
    return round_of(rank, ranks, workers, vector), vector


def round_of(rank: int, ranks: int, workers: int, vector: torch.Tensor) -> Callable[[], object]:
    """Returns what a rank does in a round."""
    if ranks == workers:
        return partial(dist.all_reduce, vector)
    return partial(_take_part, rank, workers, vector)


def _take_part(rank: int, workers: int, vector: torch.Tensor) -> None:
    dist.reduce(vector, dst=0)
    if rank == 0:
        vector.div_(workers)
    dist.broadcast(vector, src=0)
