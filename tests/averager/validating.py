"""Runs whose workers validate, and ask for the losses of epochs."""

from __future__ import annotations

from decided import Told, do
from decisions import Run, only

from sparkdl.events import ValidationReport
from sparkdl.feed.statistics.shards import ShardStatistics

HELD_OUT = ShardStatistics(1, (), held_out=1)


def with_held_out_rows(run: Run, found: ShardStatistics | None = HELD_OUT) -> Run:
    for rank in run.ranks:
        run.join(rank)
    for rank in run.ranks:
        run.read(rank, found)
    run.start()
    run.take()
    return run


def validate(run: Run, rank: int, loss: float, epoch: int = 1) -> list[Told]:
    report = ValidationReport(rank=rank, epoch=epoch, examples=1, loss_sum=loss, weight=1.0)
    return run.tell("validated", run.members[rank], report)


def ask(run: Run, rank: int, epochs: int = 1, known: int = 0) -> list[Told]:
    return run.tell("epoch_losses_wanted", run.members[rank], known, epochs)


def told(decisions: list[Told]) -> dict[int, tuple[float, ...]]:
    return {each.member.rank: each.losses for each in only(do.send_epoch_losses, decisions)}
