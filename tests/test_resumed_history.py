"""What a resumed training tells of its epochs is what one that was never interrupted tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from by_keyword import run
from interruptions import Interrupted
from toys import classification, make_job, mlp, schema

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.testing.world import _processes, _threads
from sparkdl.worker import Job

EPOCHS = 3
SIZES = (20, 9, 6)


def shards() -> list[list[pa.RecordBatch]]:
    """A third of each worker's rows is held out."""
    data = classification(SIZES)
    return [
        batches_of(5, features=features, label=targets, held=np.arange(len(targets)) % 3 == 0)
        for features, targets in map(data.shard, range(3))
    ]


def validated_job(strategy: Strategy) -> Job:
    plain, held = schema(), ColumnSpec("held", torch.bool)
    with_held = FeedSchema(plain.features, plain.label, validation=held)
    return make_job(mlp(), schema=with_held, epochs=EPOCHS, strategy=strategy)


def interrupt(job: Job, path: Path, launch: Any, epoch: int, windows: int) -> None:
    """Run until an epoch has ended, and then so many windows of the next were committed."""
    left = windows

    def on_event(event: object) -> None:
        nonlocal left
        ended = isinstance(event, EpochSummary) and event.epoch == epoch
        left -= isinstance(event, WindowReport) and event.epoch == epoch + 1
        if (ended and not windows) or left < 0:
            raise Interrupted

    policy = CheckpointPolicy(path=str(path), every_rounds=1 if windows else None)
    with pytest.raises(Interrupted):
        run(job, 3, launch(job, shards(), path.parent), checkpoints=policy, on_event=on_event)


def told(outcome: Outcome) -> list[EpochSummary]:
    return [replace(epoch, seconds=0.0) for epoch in outcome.history]


def _losses(epoch: EpochSummary) -> tuple[float, float | None]:
    return epoch.loss, epoch.validation_loss


@pytest.mark.parametrize(
    ("strategy", "windows"),
    [(ParameterAveraging(2), 0), (ParameterAveraging(1), 4), (GradientAllReduce(), 0)],
    ids=["averaging", "in-the-middle", "all-reduce"],
)
def test_the_losses_on_held_out_rows_are_those_of_a_training_never_interrupted(
    tmp_path: Path, strategy: Strategy, windows: int
) -> None:
    job = validated_job(strategy)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    whole = run_world(job, shards(), ranks_as=ranks_as)
    launch = _processes if strategy.needs.collective else _threads
    interrupt(job, tmp_path / "c", launch, epoch=2, windows=windows)
    policy = CheckpointPolicy(path=str(tmp_path / "c"))
    resumed = run_world(job, shards(), ranks_as=ranks_as, checkpoints=policy)
    assert all(epoch.validation_examples == 12 for epoch in whole.history)
    if strategy.needs.collective:  # gloo adds up three ranks' gradients in an order of its own
        assert [_losses(epoch) for epoch in told(resumed)] == [
            pytest.approx(_losses(epoch), rel=1e-12) for epoch in told(whole)
        ]
    else:
        assert told(resumed) == told(whole)


def test_a_training_that_had_ended_tells_of_its_last_epoch_too(tmp_path: Path) -> None:
    job, policy = validated_job(ParameterAveraging(2)), CheckpointPolicy(path=str(tmp_path))
    whole = run_world(job, shards(), checkpoints=policy)
    assert told(run_world(job, shards(), checkpoints=policy)) == told(whole)
