"""Checkpoints: of which commit, whose worker states are in them, and who waits for them."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
from decided import Told, do
from decisions import Every, Run, only, report, started

from sparkdl.averager.run_events import Progress
from sparkdl.errors import DeadlineError, PreemptedError, TrainingError
from sparkdl.events import EpochSummary


def asked(decisions: list[Told]) -> list[int]:
    """Whose states a checkpoint asks for, after a reply or at once."""
    replies = [reply.member.rank for reply in only(do.reply, decisions) if reply.worker_state]
    return sorted(replies + [ask.member.rank for ask in only(do.ask_worker_state, decisions)])


def write_worker_states(run: Run, *ranks: int) -> list[Told]:
    decisions: list[Told] = []
    for rank in ranks:
        decisions += run.tell("worker_state_written", run.members[rank])
    return decisions


def written(run: Run) -> list[Told]:
    return run.tell("checkpoint_ended", saved=True)


def test_it_asks_all_who_have_contributed_to_its_commit() -> None:
    run = started(2, checkpoints=Every(2))
    assert asked(run.round(step=1)) == []
    decisions = run.round(step=2)
    assert asked(decisions) == [0, 1]
    (begun,) = only(do.begin_checkpoint, decisions)
    assert [position.step for position in begun.progress.positions] == [2, 2]
    assert begun.progress.rounds == 2
    assert begun.statistics == run.coordinator.shards.statistics


def test_the_middle_of_an_epoch_is_as_large_after_two_thousand_windows_as_after_twenty() -> None:
    run, draw, sizes = started(2), np.random.default_rng(0), []
    examples, losses = draw.integers(0, 9, (1000, 2)), draw.normal(size=(1000, 2))
    for step, (rows, sums) in enumerate(zip(examples.tolist(), losses.tolist(), strict=True), 1):
        for rank in run.ranks:
            given = report(rank, examples=rows[rank], step=step, last=step == 1000)
            window = replace(given, loss_sum=sums[rank], measured={"noise": float(step)})
            decisions = run.tell("window_closed", run.members[rank], window)
            decisions += run.add(rank) if rows[rank] else []
        run.take()
        if step in (10, 990):
            sizes.append(len(pickle.dumps(run.coordinator.committed)))
            sizes.append(len(json.dumps(run.coordinator.committed.progress().as_json())))
    assert sizes[2:] == pytest.approx(sizes[:2], abs=200)
    (summary,) = (d.event for d in only(do.report, decisions) if isinstance(d.event, EpochSummary))
    assert summary.loss == pytest.approx(losses.sum() / examples.sum(), rel=1e-12)
    assert (summary.examples, summary.rounds) == (examples.sum(), 1000)
    assert summary.measured == {"noise": 1000.0}


def test_no_checkpoint_copies_the_numbers_of_every_epoch_so_far() -> None:
    epochs = [EpochSummary(epoch=e, loss=0.5, examples=4, rounds=2, seconds=1.0) for e in (1, 2)]
    said = replace(Progress.start(2), epoch=3, history=tuple(epochs)).as_json()
    assert said["history"] == [asdict(epoch) for epoch in epochs]
    for written, epoch in zip(said["history"], epochs, strict=True):
        assert written["metrics"] is epoch.metrics


def test_the_center_is_copied_after_the_commit_and_before_anybody_goes_on() -> None:
    run = started(1, checkpoints=Every(1))
    kinds = [decision.action for decision in run.contribute(0)]
    assert kinds[-4:] == ["commit", "report", "begin_checkpoint", "reply"]


def test_at_the_end_of_an_epoch_everyone_is_asked_with_the_final_center() -> None:
    run = started(2, checkpoints=Every(epochs=True))
    run.contribute(0, last=True)
    run.contribute(1)
    run.take(1)
    decisions = run.contribute(1, last=True)
    assert only(do.reply, decisions) == [
        do.reply(run.members[rank], final=True, values=True, worker_state=True) for rank in (0, 1)
    ]
    assert only(do.ask_worker_state, decisions) == []
    (begun,) = only(do.begin_checkpoint, decisions)
    assert (begun.progress.epoch, len(begun.progress.history)) == (2, 1)


def test_nobody_is_asked_twice_for_one_checkpoint() -> None:
    run = started(2, checkpoints=Every(1))
    run.contribute(0, last=True)
    assert asked(run.contribute(1)) == [0, 1]
    run.take(1)
    # The next round has to wait for the checkpoint, and asks for the next one.
    assert run.close(1) == []
    assert write_worker_states(run, 0, 1) == [do.write_checkpoint()]
    assert written(run) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
    assert asked(run.add(1)) == [0, 1]


def test_who_has_come_back_is_not_asked_for_a_commit_that_is_not_its_own() -> None:
    run = started(3, max_failures=1, checkpoints=Every(1))
    run.lose(0)
    run.contribute(1)
    run.come_back(0)
    decisions = run.contribute(2)
    assert asked(decisions) == [1, 2]
    assert decisions[-1] == do.welcome(run.members[0])
    assert write_worker_states(run, 1, 2) == [do.write_checkpoint()]


def test_who_has_come_back_is_not_asked_in_the_name_of_who_was_lost() -> None:
    run = started(2, max_failures=1, checkpoints=Every(1))
    run.contribute(0)
    run.lose(0)
    decisions = run.contribute(1)
    assert asked(decisions) == [1]
    run.come_back(0)
    assert write_worker_states(run, 1) == [do.write_checkpoint()]


def test_it_needs_no_worker_state_if_all_are_lost_that_have_contributed() -> None:
    run = started(2, max_failures=2, checkpoints=Every(1))
    run.contribute(0)
    run.lose(0)
    run.lose(1)
    decisions = run.come_back(0)
    kinds = ["commit", "report", "begin_checkpoint", "write_checkpoint", "welcome"]
    assert [decision.action for decision in decisions] == kinds


class TestWaiting:
    """A round after which a checkpoint is due waits for the one that is being written."""

    def test_rounds_go_on_until_the_next_is_due(self) -> None:
        run = started(1, checkpoints=Every(3))
        for _ in range(3):
            run.round()
        assert len(only(do.commit, run.round() + run.round())) == 2
        assert run.close(0) == []
        write_worker_states(run, 0)
        assert written(run) == [do.open_sum((0,)), do.receive(run.members[0], 1)]

    def test_whoever_finishes_leaves_once_it_is_written(self) -> None:
        run = started(2, checkpoints=Every(epochs=True))
        run.round(last=True)
        write_worker_states(run, 0, 1)
        assert run.finish(1) == run.finish(0) == []
        assert written(run) == [
            do.dismiss(run.members[1]),
            do.dismiss(run.members[0]),
            do.end(None),
        ]

    def test_whose_window_waited_is_not_late_afterwards(self) -> None:
        run = started(1, deadline_s=10, checkpoints=Every(1))
        run.round()
        write_worker_states(run, 0)
        run.close(0)
        run.wait(9)
        written(run)
        assert only(do.end, run.wait(9)) == []
        assert only(do.end, run.wait(1)) == [do.end(run.failure)]


class TestSilence:
    """How long a checkpoint may take, and who is named."""

    def fails(self, run: Run, seconds: float, words: str) -> None:
        assert only(do.end, run.wait(seconds)) == [do.end(run.failure)]
        with pytest.raises(DeadlineError, match=words):
            raise run.failure or AssertionError("the run goes on")

    def test_who_does_not_send_its_worker_state_is_named(self) -> None:
        run = started(2, deadline_s=10, checkpoints=Every(epochs=True))
        run.round(last=True)
        write_worker_states(run, 0)
        words = "rank 1 on host-1 did not send its worker state for the checkpoint before epoch 2"
        self.fails(run, 10, words)

    def test_storage_that_is_gone_ends_the_run(self) -> None:
        run = started(1, deadline_s=10, checkpoints=Every(1))
        run.round()
        write_worker_states(run, 0)
        run.close(0)
        assert only(do.end, run.wait(10)) == []
        self.fails(run, 1, "the checkpoint of epoch 1 was not written within 10 s.*checkpointPath")


class TestPreemption:
    """A run that is told to end does so once a commit has become a checkpoint."""

    def test_a_checkpoint_that_was_being_written_is_not_the_last(self) -> None:
        run = started(1, checkpoints=Every(100))
        run.tell("preempt", PreemptedError("first"))
        run.round()
        run.tell("preempt", reason := PreemptedError("second"))
        write_worker_states(run, 0)
        assert run.close(0) == []
        assert written(run) == [do.open_sum((0,)), do.receive(run.members[0], 1)]
        assert asked(run.add(0)) == [0]
        write_worker_states(run, 0)
        assert written(run) == [do.end(reason)]

    def test_whatever_ends_it_earlier_it_was_told_to_end(self) -> None:
        run = started(1, checkpoints=Every(100))
        reason = PreemptedError("the cluster shuts down")
        run.tell("preempt", reason)
        assert run.tell("fail", TrainingError("the workers are gone")) == [do.end(reason)]


class TestOneThatCouldNotBeWritten:
    def test_is_not_tried_again_before_the_next_is_due(self) -> None:
        run = started(1, checkpoints=Every(2))
        run.round(step=1)
        run.round(step=2)
        write_worker_states(run, 0)
        run.tell("checkpoint_ended", saved=False)
        assert asked(run.round(step=3)) == []
        assert asked(run.round(step=4)) == [0]
        write_worker_states(run, 0)
        written(run)
        assert run.coordinator.checkpoints.has_last_commit

    def test_lets_those_go_on_who_waited_for_it(self) -> None:
        run = started(1, checkpoints=Every(1))
        run.round()
        write_worker_states(run, 0)
        assert run.close(0) == []
        assert run.tell("checkpoint_ended", saved=False) == [
            do.open_sum((0,)),
            do.receive(run.members[0], 1),
        ]

    def test_ends_a_run_that_was_told_to_end(self) -> None:
        run = started(1, checkpoints=Every(100))
        run.tell("preempt", reason := PreemptedError("the cluster shuts down"))
        run.round()
        write_worker_states(run, 0)
        assert run.tell("checkpoint_ended", saved=False) == [do.end(reason)]
        assert not run.coordinator.checkpoints.has_last_commit


def test_what_was_committed_before_the_workers_were_started_again_may_be_in_none() -> None:
    run = started(1, checkpoints=Every(1), saved=False)
    assert not run.coordinator.checkpoints.has_last_commit
    run.round()
    write_worker_states(run, 0)
    written(run)
    assert run.coordinator.checkpoints.has_last_commit
