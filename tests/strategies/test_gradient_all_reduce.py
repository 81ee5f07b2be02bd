"""What ``GradientAllReduce`` accepts, and what it says of a feed that breaks its word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from toys import classification, make_job, mlp

from sparkdl.errors import ConfigError, WorkerError
from sparkdl.protocols import Batch
from sparkdl.strategies import GradientAllReduce, Run
from sparkdl.testing import run_world


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_mb", [0, -1, True, "25", float("nan")]),
        ("accumulate", [0, -1, 1.5, True, "2"]),
        ("compression", ["fp8", True, ""]),
        ("shard_optimizer", [1, None, "yes"]),
        ("find_unused_parameters", [1, None, "yes"]),
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
