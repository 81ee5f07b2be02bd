"""Callbacks see what happens, in its order, and end a fit with the model that they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from interruptions import policy
from toys import classification, held_out, held_out_schema, make_job, mlp

from sparkdl.averager.run_events import RoundCommitted
from sparkdl.callbacks import Callback, EarlyStopping, ModelCheckpoint, TimeBudget, Training
from sparkdl.callbacks.base import Calls
from sparkdl.errors import CallbackError, ConfigError, DisconnectedError, WorkerError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import Shard, run_world
from sparkdl.worker import Job

SIZES = [24, 12]


def with_held_out_rows(**changes: Any) -> tuple[Job, list[Shard]]:
    """A job whose workers hold every third of their rows out, and the rows."""
    return make_job(mlp(), schema=held_out_schema(), **changes), held_out(SIZES).shards()


class Diary(Callback):
    """Writes everything down, and does something after an epoch."""

    def __init__(self, deeds: dict[int, Any] | None = None) -> None:
        self.lines: list[Any] = []
        self.summaries: list[EpochSummary] = []
        self.deeds = deeds or {}
        self.rows = 0

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        self.lines.append(("start", statistics.rows, len(training.history)))

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        self.rows += sum(report.examples for report in reports)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        assert training.history[-1] == summary
        self.lines.append(("epoch", summary.epoch, self.rows))
        self.summaries.append(summary)
        self.deeds.get(summary.epoch, lambda training: None)(training)

    def on_checkpoint(self, training: Training) -> None:
        self.lines.append("checkpoint")

    def on_worker_lost(self, training: Training, rank: int | None, why: str) -> None:
        self.lines.append(("lost", rank))

    def on_end(self, training: Training, error: BaseException | None) -> None:
        self.lines.append(("end", error))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_each_method_is_called_when_it_is_its_turn(tmp_path: Path) -> None:
    job, shards = with_held_out_rows(epochs=2)
    diary = Diary()
    outcome = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[diary])
    lines = [line for line in diary.lines if line != "checkpoint"]
    assert lines == [("start", 24, 0), ("epoch", 1, 24), ("epoch", 2, 48), ("end", None)]
    assert diary.lines.count("checkpoint") == 2
    assert diary.summaries == outcome.history
    assert [each.validation_examples for each in outcome.history] == [12, 12]


@pytest.mark.parametrize(
    ("strategy", "ranks_as"),
    [
        (ParameterAveraging(2), "threads"),
        pytest.param(GradientAllReduce(), "processes", marks=pytest.mark.gate),
    ],
)
def test_a_fit_that_is_stopped_returns_the_model_of_that_epoch(
    strategy: Any, ranks_as: Any
) -> None:
    job, shards = with_held_out_rows(epochs=5, strategy=strategy, deadline_s=120.0)
    diary = Diary({2: lambda training: training.stop("enough")})
    outcome = run_world(job, shards, ranks_as=ranks_as, callbacks=[diary])
    assert outcome.stopped == "enough"
    assert [summary.epoch for summary in outcome.history] == [1, 2]
    straight = run_world(replace(job, epochs=2), shards, ranks_as=ranks_as)
    assert same(outcome.module, straight.module)


def test_the_model_that_was_kept_is_returned_and_is_what_a_second_fit_finds(tmp_path: Path) -> None:
    job, shards = with_held_out_rows(epochs=4, optimizer=partial(torch.optim.SGD, lr=1.0))
    keeping = [Diary({2: Training.keep_model})]
    kept = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=keeping).module
    straight = run_world(replace(job, epochs=2), shards).module
    assert same(kept, straight)
    assert same(
        kept, run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[Diary()]).module
    )
    assert same(kept, run_world(job, shards, checkpoints=policy(tmp_path)).module)


def test_a_stopped_training_that_is_resumed_goes_on_where_it_was(tmp_path: Path) -> None:
    job, shards = with_held_out_rows(epochs=4)
    stopping = Diary({2: lambda training: training.stop("enough")})
    run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[stopping])
    diary = Diary()
    resumed = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[diary])
    assert diary.lines[0] == ("start", 24, 1)
    # The second epoch ended before, but its workers validate once more.
    assert [line[1] for line in diary.lines if line[0] == "epoch"] == [2, 3, 4]
    assert same(resumed.module, run_world(job, shards).module)


def lose_rank_1_behind_epoch(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, among workers that are threads."""
    from sparkdl.worker import loop

    validate, lost = loop._validate, []

    def lose_connection(run: Any, feed: Any, epoch: int, *others: Any) -> Any:
        if run.rank == 1 and epoch == last and not lost:
            lost.append(epoch)
            raise DisconnectedError("the test says so")
        return validate(run, feed, epoch, *others)

    monkeypatch.setattr(loop, "_validate", lose_connection)


def test_a_lost_worker_is_told_of_and_each_epoch_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_rank_1_behind_epoch(2, monkeypatch)
    job, shards = with_held_out_rows(epochs=3, max_failures=1)
    diary = Diary()
    run_world(job, shards, callbacks=[diary])
    told = [("epoch", 1), ("lost", 1), ("epoch", 2), ("epoch", 3)]
    assert [line[:2] for line in diary.lines[1:-1]] == told


@every("hook", Callback.methods)
def test_an_error_in_a_callback_ends_the_fit_with_its_name(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("accuracy")

    broken = type("Broken", (Callback,), {hook: fail})()
    if hook == "on_worker_lost":
        lose_rank_1_behind_epoch(2, monkeypatch)
    monkeypatch.setattr("sparkdl.driver.serving.LOOK_S", 0.001)
    job, shards = with_held_out_rows(epochs=3, max_failures=1)
    with pytest.raises(CallbackError, match=f"callback Broken failed in {hook}: KeyError"):
        run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[broken])


def test_callbacks_look_at_the_clock_while_nothing_happens_but_not_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.driver.serving.LOOK_S", 0.001)
    told: list[str] = []
    hooks = {
        f"on_{when}": lambda *_, when=when: told.append(when) for when in ("start", "tick", "end")
    }
    job, shards = with_held_out_rows(epochs=20)
    run_world(job, shards, callbacks=[type("Look", (Callback,), hooks)()])
    assert told[0] == "start"
    assert "tick" in told
    assert told[-1] == "end"


def test_early_stopping_returns_the_best_epochs_model_and_does_so_again(tmp_path: Path) -> None:
    job, shards = with_held_out_rows(epochs=9, optimizer=partial(torch.optim.SGD, lr=2.0))
    stopping = EarlyStopping(patience=3, min_delta=0.2)
    outcome = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[stopping])
    losses = [summary.validation_loss or 0.0 for summary in outcome.history]
    best, least = 0, 9.0
    for epoch, loss in enumerate(losses, 1):
        if loss < least - 0.2:
            best, least = epoch, loss
    assert 1 < best < best + 3 == len(losses) < 9
    assert outcome.stopped is not None
    assert f"(epoch {best}) for 3 epochs" in outcome.stopped
    straight = run_world(replace(job, epochs=best), shards).module
    assert same(outcome.module, straight)
    again = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[stopping])
    assert len(again.history) == len(losses)
    assert same(again.module, straight)


def oscillating(**changes: Any) -> tuple[Job, list[Shard]]:
    """A training whose loss on the held-out rows goes up and down."""
    return with_held_out_rows(optimizer=partial(torch.optim.SGD, lr=8.0), **changes)


def lowest(history: Sequence[EpochSummary]) -> int:
    losses = [summary.validation_loss or 0.0 for summary in history]
    return losses.index(min(losses)) + 1


def test_a_model_checkpoint_trains_to_the_end_and_returns_the_best_epochs_model(
    tmp_path: Path,
) -> None:
    job, shards = oscillating(epochs=9)
    outcome = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint()])
    best = lowest(outcome.history)
    assert len(outcome.history) == 9
    assert 1 < best < 9
    assert same(outcome.module, run_world(replace(job, epochs=best), shards).module)
    written = sorted(tmp_path.glob("checkpoint-*"))
    for callbacks in ([ModelCheckpoint()], []):
        again = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=callbacks)
        assert same(outcome.module, again.module)
    assert sorted(tmp_path.glob("checkpoint-*")) == written


@pytest.mark.parametrize(
    "strategy",
    [ParameterAveraging(1), pytest.param(GradientAllReduce(), marks=pytest.mark.gate)],
)
def test_the_best_model_of_before_a_checkpoint_is_returned_after_it(
    strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    job, shards = oscillating(epochs=9, strategy=strategy, deadline_s=120.0)
    run = partial(run_world, shards=shards, ranks_as=ranks_as)
    straight = run(job, callbacks=[ModelCheckpoint()])
    best = lowest(straight.history)
    assert best < 9
    # The second epoch behind the best one, so that the checkpoint is not of the best one's end.
    run(replace(job, epochs=best + 1), checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint()])
    resumed = run(job, checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint()])
    assert [each.validation_loss for each in resumed.history] == [
        each.validation_loss for each in straight.history
    ]
    assert same(resumed.module, straight.module)
    assert "its model was not kept" not in caplog.text


def test_a_fit_that_was_ended_within_an_epoch_still_has_the_best_model(tmp_path: Path) -> None:
    class Interrupt(Callback):
        rounds = 0

        def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
            self.rounds += 1
            if self.rounds == 4 * 5 + 2:
                training.stop("two rounds after the fifth epoch")

    job, shards = oscillating(epochs=9)
    straight = run_world(job, shards, callbacks=[ModelCheckpoint()])
    assert lowest(straight.history) < 5
    run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint(), Interrupt()])
    resumed = run_world(job, shards, checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint()])
    assert len(resumed.history) == 9
    assert same(resumed.module, straight.module)


OWN_STATES = {
    "strategy": ParameterAveraging(2, average_optimizer_state=False),
    "optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
}


@every_row(({}, 2), (OWN_STATES, 4))
def test_a_training_goes_on_from_its_last_model_and_states_and_not_from_the_one_that_was_kept(
    tmp_path: Path, changes: dict[str, Any], kept: int
) -> None:
    job, shards = with_held_out_rows(epochs=4, **changes)
    keeping = [Diary({kept: Training.keep_model})]
    run_world(job, shards, checkpoints=policy(tmp_path), callbacks=keeping)
    longer = replace(job, epochs=6)
    resumed = run_world(longer, shards, checkpoints=policy(tmp_path))
    assert same(resumed.module, run_world(longer, shards).module)


def test_a_best_epoch_that_nobody_kept_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, shards = oscillating(epochs=4)
    run_world(job, shards, checkpoints=policy(tmp_path))
    run_world(
        replace(job, epochs=5), shards, checkpoints=policy(tmp_path), callbacks=[ModelCheckpoint()]
    )
    assert "was the best before the checkpoint, but its model was not kept" in caplog.text


def test_a_model_checkpoint_follows_a_loss_that_there_is() -> None:
    with pytest.raises(ConfigError, match="metric must be validation_loss or loss, or the name"):
        ModelCheckpoint("")
    summary = EpochSummary(epoch=1, loss=0.0, examples=1, rounds=1, seconds=1.0)
    with pytest.raises(ConfigError, match="epoch 1 has no loss on held-out rows"):
        ModelCheckpoint().on_epoch(Training(1, [summary]), summary)


@every_row(
    (ModelCheckpoint(), "ModelCheckpoint follows the loss on held-out rows"),
    (EarlyStopping(), "validationIndicatorCol"),
)
def test_without_held_out_rows_nothing_follows_their_loss(callback: Callback, words: str) -> None:
    job, shards = make_job(mlp(), epochs=2), classification(SIZES).shards()
    with pytest.raises(ConfigError, match=words):
        run_world(job, shards, callbacks=[callback])


def test_an_improvement_has_to_be_large_enough() -> None:
    losses = [1.0, 0.9, 0.85, 0.84, 0.7]
    history = [
        EpochSummary(epoch=e, loss=loss, examples=1, rounds=1, seconds=1.0)
        for e, loss in enumerate(losses, 1)
    ]
    stops = {}
    for delta in (0.0, 0.08, 0.5):
        stopping = EarlyStopping("loss", patience=2, min_delta=delta)
        for epochs in range(1, 6):
            training = Training(5, history[:epochs])
            stopping.on_epoch(training, history[epochs - 1])
            if training.stopped is not None:
                stops[delta] = epochs
                break
    # of 0.08: 0.9 is an improvement on 1.0, and neither 0.85 nor 0.84 is one on 0.9
    assert stops == {0.08: 4, 0.5: 3}


@every(
    ("name", "value"),
    [
        *(("metric", ""), ("mode", "largest"), ("mode", "max"), ("restore_best", "no")),
        *(("patience", 0), ("patience", True), ("min_delta", -1), ("min_delta", float("nan"))),
    ],
)
def test_early_stopping_refuses_what_makes_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EarlyStopping(**{name: value})


def test_a_time_budget_ends_the_training_at_a_round() -> None:
    job, shards = with_held_out_rows(epochs=100_000)
    outcome = run_world(job, shards, callbacks=[TimeBudget(0.5)])
    assert outcome.stopped == "its time budget of 0.5 s is used up"
    assert len(outcome.history) < 100_000


@every("seconds", [0, -1.0, float("inf"), "1", float("nan")])
def test_a_time_budget_is_a_time(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="seconds must be"):
        TimeBudget(seconds)


class Broken(Callback):
    def on_end(self, training: Training, error: BaseException | None) -> None:
        raise KeyError("disk")


def test_every_callback_is_told_of_the_end_also_behind_one_that_fails_there() -> None:
    diary = Diary()
    calls = Calls([Broken(), diary, Broken()], Training(1))
    with pytest.raises(CallbackError, match="callback Broken failed in on_end: KeyError"):
        calls.end(None)
    assert diary.lines == [("end", None)]


def test_what_ended_a_fit_reaches_every_callback_whichever_fails_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    diary = Diary()
    job, shards = with_held_out_rows(epochs=1, loss=lambda outputs, targets: 1 / 0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        run_world(job, shards, callbacks=[Broken(), diary])
    assert "callback Broken failed in on_end" in caplog.text
    (what, error) = diary.lines[-1]
    assert what == "end"
    assert isinstance(error, WorkerError)


def test_a_round_that_nobody_contributed_to_moves_no_step() -> None:
    calls = Calls([], Training(1, step=7))
    calls(RoundCommitted(3, ()))
    assert calls.training.step == 7
