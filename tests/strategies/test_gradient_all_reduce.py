"""What ``GradientAllReduce`` accepts, and what it says of a feed that breaks its word."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle
import pytest
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.errors import ConfigError, WorkerError
from sparkdl.protocols import Batch
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Run, Strategy
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_mb", [0, -1, True, "25", float("nan")]),
        ("accumulate", [0, -1, 1.5, True, "2"]),
        ("compression", ["fp8", True, ""]),
        ("commit_every", [0, -1, 1.5, True, "2"]),
        ("shard_optimizer", [1, None, "yes"]),
        ("find_unused_parameters", [1, None, "yes"]),
        ("sync_batch_norm", [1, None, "yes"]),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=name):
            GradientAllReduce(**{name: value})


def test_it_needs_a_collective_and_hands_the_driver_what_every_worker_has() -> None:
    assert GradientAllReduce().needs_collective
    assert GradientAllReduce().exchanges_optimizer_state
    assert not GradientAllReduce(shard_optimizer=True).exchanges_optimizer_state


class Forgetful(GradientAllReduce):
    """Loses the last minibatch of each epoch."""

    def train_epoch(self, run: Run, batches: Iterable[Batch]) -> None:
        def without_the_last() -> Iterator[Batch]:
            yield from (batch for batch in batches if not batch.last)

        super().train_epoch(run, without_the_last())


def test_fewer_rows_than_were_announced_are_an_error_for_the_weights_would_be_wrong() -> None:
    job = make_job(mlp(), strategy=Forgetful())
    with pytest.raises(WorkerError, match="trained on 8 rows in epoch 1, but had announced 10"):
        run_world(job, classification([10]).shards())


class Slow(nn.Module):
    """Takes a fifth of a second a minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(0.2)
        return self.layer(features)


@pytest.mark.parametrize(
    "strategy", [GradientAllReduce(), ParameterAveraging(period=2, aggregation="executors")]
)
def test_an_epoch_may_take_longer_than_the_deadline_for_its_workers_give_signs_of_life(
    strategy: Strategy,
) -> None:
    job = make_job(Slow(), strategy=strategy, deadline_s=6.0, batch_size=1)
    outcome = run_world(job, classification([40, 35]).shards(), ranks_as="processes")
    assert outcome.history[0].seconds > 7
    assert outcome.history[0].examples == 75
