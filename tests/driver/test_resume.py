"""Trainings that go on from a checkpoint; ``strategies/contract/test_recovery.py`` has them all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from interruptions import OPTIMIZERS, die_after, policy, same_bits, save_and_stop
from misbehaving import resume_after
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, schema

from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver import Outcome
from sparkdl.events import EpochSummary
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.testing.world import _processes, _threads
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [22, 14, 5]
"""Of batches of 4 in windows of 2, so 3, 2 and 1 windows an epoch."""


@settings(max_examples=20, deadline=None)
@given(
    windows=st.integers(0, 23),
    stop=st.sampled_from([die_after, save_and_stop]),
    every_rounds=st.sampled_from([None, 1, 2]),
)
@pytest.mark.nightly
def test_at_whatever_commit_it_was_interrupted(
    tmp_path_factory: pytest.TempPathFactory, windows: int, stop: Any, every_rounds: int | None
) -> None:
    path = tmp_path_factory.mktemp("checkpoints") / "c"
    job = make_job(mlp(), optimizer=OPTIMIZERS["Adam"], epochs=4)
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    stop(job, data, path, windows, every_rounds=every_rounds)
    if every_rounds and stop is die_after:
        assert_saved_at_least(path, windows - len(SIZES) * (1 + every_rounds))
    resumed = run_world(job, data.shards(), checkpoints=policy(path))
    assert same_bits(resumed, whole)
    assert [row.examples for row in resumed.history] == [41] * 4
    assert [row.loss for row in resumed.history] == [row.loss for row in whole.history]
    assert [row.rounds for row in resumed.history] == [row.rounds for row in whole.history]


def assert_saved_at_least(path: Path, windows: int) -> None:
    """The newest checkpoint holds at least so many windows, of 12 an epoch."""
    saved = CheckpointStore(str(path), keep_last=2).newest()
    if saved is None:
        assert windows <= 0
        return
    progress = saved.description["progress"]
    saved_windows = sum(each["contributions"] for each in progress["sums"])
    assert 12 * len(progress["history"]) + saved_windows >= windows


class LateLayer(nn.Module):
    """Uses its second layer from the 13th minibatch on: the third epoch of the first worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = mlp(), mlp(seed=4)
        self.register_buffer("minibatches", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        self.minibatches += self.training
        outputs: Tensor = self.first(features)
        return outputs + self.late(features) if self.minibatches > 12 else outputs


@pytest.mark.parametrize("windows", [5, 16], ids=["before", "after"])
def test_a_layer_that_is_first_used_late_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, windows: int
) -> None:
    job = make_job(
        LateLayer(), optimizer=OPTIMIZERS["Adam"], strategy=ParameterAveraging(2), epochs=4
    )
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert not torch.equal(
        whole.module.get_parameter("late.0.weight"), LateLayer().late.get_parameter("0.weight")
    )
    assert same_bits(resume_after(windows, job, data, tmp_path), whole)


def test_never_resuming_starts_anew_and_later_runs_go_on_from_that(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([12, 8])
    run_world(make_job(mlp(), epochs=4), data.shards(), checkpoints=policy(tmp_path / "c"))
    anew = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c", resume="never"))
    assert len(anew.history) == 2
    again = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert again.history == anew.history


def test_of_its_own_a_training_resumes_only_what_it_has_written(tmp_path: Path) -> None:
    data, path = classification([12, 8]), tmp_path / "c"
    run_world(make_job(mlp(), epochs=2), data.shards(), checkpoints=policy(path))
    own = policy(path, resume="own", training="mine")
    other = make_job(mlp(), epochs=2, optimizer=OPTIMIZERS["Adam"])
    anew = run_world(other, data.shards(), checkpoints=own)
    assert same_bits(anew, run_world(other, data.shards()))
    again = run_world(other, data.shards(), checkpoints=own)
    assert again.history == anew.history


class Held(Data):
    """Of which a third of each worker's rows is held out."""

    def shards(self, rows_a_batch: int = 5) -> Any:
        return [
            batches_of(rows_a_batch, features=f, label=t, held=np.arange(len(t)) % 3 == 0)
            for f, t in map(self.shard, range(len(self.sizes)))
        ]


HELD = Held(*vars(classification([20, 9, 6])).values())
"""Of batches of 4: 4, 2 and 1 steps an epoch."""


def validated_job(strategy: Strategy[Any]) -> Job:
    plain, held = schema(), ColumnSpec("held", torch.bool)
    columns = FeedSchema(plain.features, plain.label, validation=held)
    return make_job(mlp(), schema=columns, epochs=3, strategy=strategy)


def history_of(outcome: Outcome) -> list[EpochSummary]:
    return [replace(epoch, seconds=0.0) for epoch in outcome.history]


def losses_of(outcome: Outcome) -> list[float | None]:
    return [loss for each in outcome.history for loss in (each.loss, each.validation_loss)]


@pytest.mark.parametrize(
    ("strategy", "windows", "every_rounds"),
    [
        (ParameterAveraging(2), 8, None),
        (ParameterAveraging(1), 18, 1),
        (GradientAllReduce(), 6, None),
    ],
    ids=["averaging", "in-the-middle", "all-reduce"],
)
def test_the_losses_on_held_out_rows_are_those_of_a_training_never_interrupted(
    tmp_path: Path, strategy: Strategy[Any], windows: int, every_rounds: int | None
) -> None:
    job, path, among = validated_job(strategy), tmp_path / "c", strategy.needs.collective
    ranks_as: Any = "processes" if among else "threads"
    whole = run_world(job, HELD.shards(), ranks_as=ranks_as)
    launch = _processes if among else _threads
    assert die_after(job, HELD, path, windows, launch, every_rounds=every_rounds)
    resumed = run_world(job, HELD.shards(), ranks_as=ranks_as, checkpoints=policy(path))
    assert all(epoch.validation_examples == 12 for epoch in whole.history)
    if among:  # gloo adds up three ranks' gradients in an order of its own
        assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-12)
    else:
        assert history_of(resumed) == history_of(whole)


def test_a_training_that_had_ended_tells_of_its_last_epoch_too(tmp_path: Path) -> None:
    job, checkpoints = validated_job(ParameterAveraging(2)), policy(tmp_path)
    whole = run_world(job, HELD.shards(), checkpoints=checkpoints)
    again = run_world(job, HELD.shards(), checkpoints=checkpoints)
    assert history_of(again) == history_of(whole)
