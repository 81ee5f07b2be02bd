"""An epoch's metrics are computed once every rank has counted, and all wait for that."""

from __future__ import annotations

from typing import Any

import pytest
from decisions import Run, only
from every_row import every
from validating import HELD_OUT, ask, told, with_held_out_rows

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.messages.headers import MAX_STATES_BYTES, read_states_size
from sparkdl.averager.messages.progress import WorkerState
from sparkdl.averager.messages.run_events import EpochCounted, EpochValidated
from sparkdl.errors import TrainingError
from sparkdl.events import ValidationReport


def measuring(max_failures: int = 0, metric: str | None = None) -> Run:
    run = Run(2)
    spec = RunSpec(
        world_size=2,
        deadline_s=60.0,
        tolerance=Tolerance(max_failures, 1),
        followed=True,
        measures=True,
        metric=metric,
    )
    run.coordinator = Coordinator(spec, run.now)
    return with_held_out_rows(run)


def count(run: Run, rank: int, epoch: int = 1) -> list[do.Decision]:
    report = ValidationReport(rank=rank, epoch=epoch, examples=1, loss_sum=2.0, weight=1.0)
    states = WorkerState()
    states.add(f"{rank} in {epoch}".encode())
    return run.tell(on.Validated(run.members[rank], report, states))


def counted(decisions: list[do.Decision]) -> list[Any]:
    events = [each.event for each in only(do.Report, decisions)]
    return [
        (each.epoch, [s and b"".join(s.blocks(99)).decode() for s in each.states])
        for each in events
        if isinstance(each, EpochCounted)
    ]


def validated(decisions: list[do.Decision]) -> list[Any]:
    events = [each.event for each in only(do.Report, decisions)]
    return [each.summary.metrics for each in events if isinstance(each, EpochValidated)]


def test_the_driver_is_given_what_all_have_counted_by_rank_and_callbacks_what_it_answers() -> None:
    run = measuring(metric="auroc")
    run.round(last=True)
    assert counted(count(run, 1)) == []
    ask(run, 1)
    decisions = count(run, 0)
    assert counted(decisions) == [(1, ["0 in 1", "1 in 1"])]
    assert validated(decisions) == []
    assert told(decisions) == {}
    decisions = run.tell(on.EpochMeasured(1, {"auroc": 0.75}))
    assert validated(decisions) == [{"auroc": 0.75}]
    assert told(decisions) == {}
    # What follows a metric is told that, not the loss.
    assert told(run.tell(on.EpochApproved(1))) == {1: (0.75,)}


def test_who_was_lost_before_it_had_counted_is_waited_for_and_counts_once() -> None:
    run = measuring(max_failures=2)
    run.round(last=True)
    count(run, 0)
    ask(run, 0)
    assert counted(run.lose(0)) == []
    run.join(0, 1, "elsewhere")
    run.read(0, HELD_OUT)
    run.take(0)
    count(run, 0)
    assert counted(count(run, 1)) == [(1, ["0 in 1", "1 in 1"])]
    # Again while the driver computes: it is told nothing new.
    assert counted(count(run, 1)) == []
    run.tell(on.EpochMeasured(1, {}))
    run.tell(on.EpochApproved(1))
    run.round(last=True, epoch=2, step=2)
    count(run, 0, epoch=2)
    assert counted(count(run, 1, epoch=2)) == [(2, ["0 in 2", "1 in 2"])]


def test_of_an_epoch_that_is_long_over_nothing_is_kept() -> None:
    run = measuring()
    run.round(last=True)
    for epoch in (-3, 0, 2, 77):
        count(run, 1, epoch)
    assert counted(count(run, 0)) == []
    assert counted(count(run, 1)) == [(1, ["0 in 1", "1 in 1"])]


@every("size", [-1, MAX_STATES_BYTES // 4 + 1, 1.0, True, "8", None, [8]])
def test_more_than_a_workers_share_or_no_number_of_bytes_is_refused(size: Any) -> None:
    assert read_states_size({"states": MAX_STATES_BYTES // 4}, 0, 4) == MAX_STATES_BYTES // 4
    assert read_states_size({}, 0, 4) == 0
    with pytest.raises(TrainingError, match="instead of its metrics' states"):
        read_states_size({"states": size}, 0, 4)
