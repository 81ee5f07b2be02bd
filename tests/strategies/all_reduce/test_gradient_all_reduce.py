"""All-reduce of gradients."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import trainings
from every_row import every
from torch import Tensor, nn
from toys import Data, SparseTable, batches_by_hand, classification, make_job, mlp, schema

from sparkdl.errors import NonFiniteError, WorkerError
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import (
    ColorTrees,
    GradientAllReduce,
    Hybrid,
    ParameterAveraging,
    PowerSGD,
    Run,
    Strategy,
)
from sparkdl.strategies.all_reduce.gradients import HOOKS
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def test_a_transform_that_changes_the_number_of_rows_is_told_of_after_the_first_step() -> None:
    def doubled(batch: Batch) -> Batch:
        features = tuple(torch.cat([each, each]) for each in batch.features)
        return replace(batch, features=features, targets=torch.cat([batch.targets, batch.targets]))

    feed = FeedOptions(transform=doubled)
    job = make_job(mlp(), strategy=GradientAllReduce(), feed=feed)
    told = "step 1: .* trained on 8 rows .* announced 4 .* as many rows from batchTransform as it"
    with pytest.raises(WorkerError, match=told):
        run_world(job, classification([10]).shards())


class Slow(nn.Module):
    """Takes 0.6 s a minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(0.6)
        return self.layer(features)


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
    send, update = HOOKS["bf16"], Replica.update

    def updating(self: Replica, gain: float) -> None:
        events.append("update")
        update(self, gain)

    def noting(*arguments: Any) -> Any:
        events.append("sent")
        return send(*arguments)

    def build() -> nn.Module:
        model = mlp()
        next(model.parameters()).register_hook(lambda gradient: events.append("first-layer"))
        return model

    monkeypatch.setitem(HOOKS, "bf16", noting)
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


def test_each_worker_keeps_the_optimizers_state_of_its_share(tmp_path: Path) -> None:
    job = make_job(
        mlp(),
        strategy=GradientAllReduce(shard_optimizer=True),
        optimizer=functools.partial(Noting, folder=str(tmp_path), lr=0.01),
    )
    run_world(job, classification([12, 12]).shards(), ranks_as="processes")
    (tmp_path / str(os.getpid())).unlink(missing_ok=True)  # the driver tries a step
    kept = sorted(int(path.read_text()) for path in tmp_path.iterdir())
    total = sum(parameter.numel() for parameter in mlp().parameters())
    assert sum(kept) == total
    assert kept[-1] < 0.8 * total


for module in (sys.modules[__name__], trainings):
    cloudpickle.register_pickle_by_value(module)

MARK = 1e6


class Marked(nn.Module):
    """At the row that has a feature of MARK the gradients, but not always the loss, are infinite.

    Args:
        factor: by which the gradient grows there on its way back.
        loss_too: whether the outputs are spoilt as well.
    """

    def __init__(self, factor: float, *, loss_too: bool) -> None:
        super().__init__()
        self.inner = mlp()
        self.factor = factor
        self.loss_too = loss_too

    def forward(self, features: Tensor) -> Tensor:
        marked = (features.abs() >= MARK).any()
        outputs: Tensor = self.inner(features.clamp(-3, 3))
        if not marked:
            return outputs
        if self.loss_too:
            return outputs * self.factor
        return _Steep.apply(outputs, self.factor)


class _Steep(torch.autograd.Function):
    """The identity, with a gradient that is none."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def marked_data(sizes: list[int], rank: int) -> tuple[Data, int]:
    """A row of a rank is marked; returns in which of its minibatches of the first epoch."""
    data = classification(sizes)
    row = sum(sizes[:rank]) + sizes[rank] // 2
    value = data.features[row, 1]
    order = batches_by_hand(data, rank, 1, 4)
    data.features[row, 0] = MARK
    return data, 1 + next(i for i, (features, _) in enumerate(order) if value in features)


def error_of(data: Data, model: nn.Module, **strategy: Any) -> NonFiniteError:
    job = make_job(model, strategy=GradientAllReduce(**strategy), epochs=2)
    with pytest.raises(NonFiniteError) as caught:
        run_world(job, data.shards(), ranks_as="processes")
    return caught.value


@pytest.mark.nightly_variants(every=5)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("loss_too", [False, True], ids=["gradient", "loss"])
def test_the_rank_the_epoch_and_the_step_are_named(
    rank: int, factor: float, loss_too: bool
) -> None:
    data, step = marked_data([20, 16, 24], rank)
    error = error_of(data, Marked(factor, loss_too=loss_too))
    assert (error.rank, error.epoch, error.step) == (rank, 1, step)
    assert f"rank {rank} has " in str(error)
    assert f"among its gradients in epoch 1, step {step} (loss of its minibatch: " in str(error)
    spoilt = "nan" in str(error).partition("minibatch: ")[2]
    assert spoilt == loss_too


def test_all_whose_gradients_are_not_finite_are_named() -> None:
    data = classification([8, 8, 8])
    data.features[8:, 0] = MARK
    error = error_of(data, Marked(float("nan"), loss_too=False))
    assert (error.rank, error.epoch, error.step) == (1, 1, 1)
    assert "rank 0 has" not in str(error)
    assert "rank 1 has" in str(error)
    assert "rank 2 has" in str(error)


class SpoiltOnce(Marked):
    """Is sound when computed once more."""

    def forward(self, features: Tensor) -> Tensor:
        outputs = super().forward(features)
        if (features.abs() >= MARK).any():
            self.factor = 1.0
        return outputs


def test_what_cannot_be_found_again_ends_the_run_all_the_same() -> None:
    data, step = marked_data([20, 16], 1)
    error = error_of(data, SpoiltOnce(float("nan"), loss_too=False))
    assert (error.epoch, error.step) == (1, step)
    assert "though each worker's own are when computed again" in str(error)


class MarkedTable(SparseTable):
    def forward(self, features: Tensor) -> Tensor:
        marked = (features.abs() >= MARK).any()
        outputs = super().forward(features)
        return _Steep.apply(outputs, float("nan")) if marked else outputs


def test_sparse_gradients_are_looked_at_too() -> None:
    data, step = marked_data([20, 16], 1)
    error = error_of(data, MarkedTable())
    assert (error.rank, error.epoch, error.step) == (1, 1, step)


@pytest.mark.nightly_variants(daily=3)
@pytest.mark.parametrize(
    "strategy",
    [
        {"bucket_mb": 0.0001, "reduction": ColorTrees(2, 0.1)},
        {"compression": PowerSGD(1, start_after=0)},
        {"hybrid": Hybrid("inner.0", 1), "accumulate": 2},
        {"bucket_mb": 0.0001},
        {"accumulate": 2},
        {"compression": "bf16"},
        {"shard_optimizer": True},
        {"shard_parameters": True},
        {"find_unused_parameters": True},
        {"hybrid": Hybrid("*", 1)},
    ],
    ids=str,
)
def test_however_the_gradients_travel(strategy: dict[str, Any]) -> None:
    data, minibatch = marked_data([20, 16], 1)
    error = error_of(data, Marked(float("nan"), loss_too=False), **strategy)
    step = -(-minibatch // strategy.get("accumulate", 1))
    assert (error.rank, error.epoch, error.step) == (1, 1, step)


def test_what_is_too_large_for_float16_is_told_from_what_is_not_finite() -> None:
    data, step = marked_data([20, 16], 1)
    model = Marked(1e9, loss_too=False)
    error = error_of(data, model, compression="fp16")
    assert (error.rank, error.step) == (1, step)
    assert "rounded to torch.float16" in str(error)
    assert "compression='bf16'" in str(error)


def test_a_buffer_that_is_not_finite_is_named_by_its_rank_when_buffers_are_averaged() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), mlp()).double()
    data = classification([20, 16], dtype=np.float64)
    data.features[30, 0] = 1e300  # its variance overflows, what is normalized by it does not

    error = error_of(data, model)

    assert (error.rank, error.epoch) == (1, 1)
    assert "buffers" in str(error)


def test_parameters_that_overflow_in_the_update_end_the_run() -> None:
    job = make_job(
        mlp(), strategy=GradientAllReduce(), optimizer=partial(torch.optim.SGD, lr=1e308), epochs=1
    )
    with pytest.raises(NonFiniteError, match="learning rate"):
        run_world(job, classification([20, 16]).shards(), ranks_as="processes")
