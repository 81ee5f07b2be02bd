"""A round over gloo: the driver is a third rank that takes part in reduce and broadcast."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from round_processes import RoundProcesses


def rounds(workers: int, numel: int, folder: Path) -> RoundProcesses:
    """Starts the driver's rank and the workers.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        folder: an empty folder through which the ranks find each other.

    Returns:
        The processes, to be closed by leaving their ``with`` block.
    """
    # The driver's rank is 0, so that it only adds up.
    given = (workers, numel, folder)
    return RoundProcesses(_member, workers + 1, given, expected=(workers + 1) / 2)


def _member(
    rank: int, workers: int, numel: int, folder: Path
) -> tuple[Callable[[], None], torch.Tensor]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=workers + 1
    )
    vector = torch.empty(numel)
    return partial(take_part, rank, workers, vector), vector


def take_part(rank: int, workers: int, vector: torch.Tensor) -> None:
    """Takes part in a round."""
    dist.reduce(vector, dst=0)
    if rank == 0:
        vector.div_(workers)
    dist.broadcast(vector, src=0)
