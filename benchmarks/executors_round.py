"""Time of one round of ParameterAveraging(aggregation="executors"), against a bare all-reduce.

Two workers, 25 M float32 parameters, gloo. Ours checks for nonfinite values and forms the weighted
mean; the peer only sums the same bytes. Rounds are interleaved.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import harness
import torch
from peers import gloo_all_reduce
from round_processes import RoundProcesses

from sparkdl.collective import join_collective
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import WorkerGroup

WORKERS = 2
NUMEL = 25_000_000


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=25, quick_repeats=5)
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        RoundProcesses(_member, WORKERS, (Path(first),), expected=(WORKERS - 1) / 2) as ours,
        gloo_all_reduce.rounds(WORKERS, NUMEL, Path(second)) as bare,
    ):
        turns = {"executors": ours.round, "bare all-reduce": bare.round}
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=3)
    medians = {name: harness.show(name, seconds) for name, seconds in measured.items()}
    claim = harness.Claim(
        name=f"executors / bare gloo all-reduce, {NUMEL:,} parameters",
        ratio=medians["executors"] / medians["bare all-reduce"],
        target=1.15,
    )
    harness.report("executors_round", [claim], {"median_seconds": medians, "seconds": measured})


class _Folder:
    """Lets the ranks find each other through files, in place of an averager."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._store = torch.distributed.FileStore(str(folder / "gather"), WORKERS)
        self._rank = rank
        self._turn = 0

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Give an object and receive those of all ranks."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self._rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._turn}/{rank}")) for rank in range(WORKERS)]


def _member(rank: int, folder: Path) -> tuple[Callable[[], None], torch.Tensor]:
    averager = _Folder(folder, rank)
    joining = join_collective(rank, averager.gather, device="cpu", deadline_s=120.0)
    collective = joining.__enter__()
    run = Run(rank, cast(Any, None), cast(Any, averager), rows=64, collective=collective)
    vector = torch.empty(NUMEL)
    group = WorkerGroup(run, 64)
    take_part = partial(group.average, [vector], [64] * WORKERS, run.window())
    take_part.joining = joining  # type: ignore[attr-defined] # keeps the group alive
    return take_part, vector


if __name__ == "__main__":
    main()
