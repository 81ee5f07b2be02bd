"""What ``GradientAllReduce`` accepts, and what it says of a feed that breaks its word."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from torch import Tensor, nn
from toys import classification, make_job, mlp, schema

from sparkdl.errors import WorkerError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Run, Strategy
from sparkdl.strategies.all_reduce.gradients import FiniteGradients
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_it_needs_a_collective_and_hands_the_driver_what_every_worker_has() -> None:
    assert GradientAllReduce().needs.collective
    assert GradientAllReduce().needs.exchanges_optimizer_state
    assert not GradientAllReduce(shard_optimizer=True).needs.exchanges_optimizer_state


class Forgetful(GradientAllReduce):
    """Loses the last minibatch of each epoch."""

    def train_epoch(self, run: Run, state: Any, batches: Iterable[Batch]) -> None:
        def without_the_last() -> Iterator[Batch]:
            yield from (batch for batch in batches if not batch.last)

        super().train_epoch(run, state, without_the_last())


def test_fewer_rows_than_were_announced_are_an_error_for_the_weights_would_be_wrong() -> None:
    job = make_job(mlp(), strategy=Forgetful())
    with pytest.raises(WorkerError, match="trained on 8 rows in epoch 1, but had announced 10"):
        run_world(job, classification([10]).shards())


class Slow(nn.Module):
    """Takes 0.6 s a minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(0.6)
        return self.layer(features)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", [GradientAllReduce(), ParameterAveraging(period=2, aggregation="executors")]
)
def test_an_epoch_may_take_longer_than_the_deadline_for_its_workers_give_signs_of_life(
    strategy: Strategy,
) -> None:
    job = make_job(Slow(), strategy=strategy, deadline_s=20.0, batch_size=1)
    outcome = run_world(job, classification([40, 35]).shards(), ranks_as="processes")
    assert outcome.history[0].seconds > 20
    assert outcome.history[0].examples == 75


def events_of_a_step(bucket_mb: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in the last step: gradients sent off, and the first layer's computed."""
    events: list[str] = []
    scan, update = FiniteGradients.scan, Replica.update

    def updating(self: Replica, gain: float) -> None:
        events.append("update")
        update(self, gain)

    def noting(self: FiniteGradients, values: Tensor) -> None:
        events.append("sent")
        scan(self, values)

    def build() -> nn.Module:
        model = mlp()
        next(model.parameters()).register_hook(lambda gradient: events.append("first-layer"))
        return model

    monkeypatch.setattr(FiniteGradients, "scan", noting)
    monkeypatch.setattr(Replica, "update", updating)
    # With a compression there is a hook that can be watched.
    job = make_job(build, strategy=GradientAllReduce(bucket_mb=bucket_mb, compression="bf16"))
    run_world(job, classification([16]).shards())
    return " ".join(events).split("update")[-2].strip().split(" ")


def test_buckets_are_sent_off_while_backward_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert events_of_a_step(25, monkeypatch) == ["first-layer", "sent"]
    events = events_of_a_step(0.0001, monkeypatch)
    assert events.index("sent") < events.index("first-layer")
    assert events.count("sent") > 1


@every("compression", ["fp16", "bf16"])
def test_rounded_gradients_are_half_the_bytes(
    compression: Any, sent: list[tuple[str, torch.dtype, int]]
) -> None:
    sent.clear()
    model = nn.Linear(60, 40)
    job = make_job(
        model,
        strategy=GradientAllReduce(compression=compression),
        schema=schema(60, torch.float32),
        loss=nn.CrossEntropyLoss(),
    )
    steps = 5
    run_world(job, classification([4 * steps], width=60, dtype=np.float32).shards())

    own = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert [octets for *_, octets in sent] == [own / 2] * steps


class Noting(torch.optim.Adam):
    """Notes of how many numbers it keeps state."""

    def __init__(self, parameters: Any, *, folder: str, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.folder = folder

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        kept = sum(value["exp_avg"].numel() for value in self.state.values())
        Path(self.folder, str(os.getpid())).write_text(str(kept))
        return result


@pytest.mark.parametrize("sharded", [True, False])
def test_each_worker_keeps_the_optimizers_state_of_its_share(tmp_path: Path, sharded: bool) -> None:
    job = make_job(
        mlp(),
        strategy=GradientAllReduce(shard_optimizer=sharded),
        optimizer=functools.partial(Noting, folder=str(tmp_path), lr=0.01),
    )
    run_world(job, classification([12, 12]).shards(), ranks_as="processes")
    (tmp_path / str(os.getpid())).unlink(missing_ok=True)  # the driver tries a step
    kept = sorted(int(path.read_text()) for path in tmp_path.iterdir())
    total = sum(parameter.numel() for parameter in mlp().parameters())
    if sharded:
        assert sum(kept) == total
        assert kept[-1] < 0.8 * total
    else:
        assert kept == [total, total]
