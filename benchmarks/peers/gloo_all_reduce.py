"""A round as one bare gloo all-reduce among the workers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from round_processes import RoundProcesses


def rounds(workers: int, numel: int, folder: Path) -> RoundProcesses:
    """Starts the workers.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        folder: an empty folder through which the ranks find each other.

    Returns:
        The processes, to be closed by leaving their ``with`` block.
    """
    given = (workers, numel, folder)
    return RoundProcesses(_member, workers, given, expected=sum(range(workers)))


def _member(
    rank: int, workers: int, numel: int, folder: Path
) -> tuple[Callable[[], None], torch.Tensor]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=workers
    )
    vector = torch.empty(numel)
    return partial(dist.all_reduce, vector), vector
