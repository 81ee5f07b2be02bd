"""AdaScale is the paper's algorithm in plain torch, and goes on from checkpoints to the bit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from toys import Data, batches_by_hand, classification, make_job, mlp, relative_error

from sparkdl.driver import Outcome
from sparkdl.strategies import AdaScale, GradientAllReduce, KFACPreconditioner
from sparkdl.strategies.all_reduce.model_and_loss import PiggybackedScalar
from sparkdl.testing import run_world

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RATE = [0.1 * 0.8 ** (step // 3) for step in range(100)]
"""Of ``StepLR(step_size=3, gamma=0.8)``, as a table."""


def by_hand(
    data: Data, workers: int, epochs: int
) -> tuple[nn.Module, list[dict[str, float]], list[float]]:
    """Johnson et al. 2020, algorithm 1; each worker has as many rows in each step.

    Returns:
        The model, what an epoch measures, and each step's gain.
    """
    module = mlp().train()
    parameters = list(module.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    theta, variance, square, steps = 1 - workers / 1000, 0.0, 0.0, 0.0
    history, gains = [], []
    for epoch in range(1, epochs + 1):
        for parts in zip(
            *(batches_by_hand(data, w, epoch, 4) for w in range(workers)), strict=True
        ):
            each = []
            for features, targets in parts:
                loss = nn.functional.cross_entropy(
                    module(torch.from_numpy(features)), torch.from_numpy(targets)
                )
                each.append(torch.autograd.grad(loss, parameters))
            mean = [sum(gs) / workers for gs in zip(*each, strict=True)]
            norm = sum(float(g.square().sum()) for g in mean)
            norms = [sum(float(g.square().sum()) for g in one) for one in each]
            now = (np.mean(norms) - norm) * workers / (workers - 1)
            variance = theta * variance + (1 - theta) * now
            square = theta * square + (1 - theta) * (norm - now / workers)
            # The correction for the start is the same for both means, and cancels.
            signal = max(square, 0.0)  # means of few steps may be less
            gain = (variance + signal) / (variance / workers + signal)
            with torch.no_grad():
                for p, v, g in zip(parameters, velocity, mean, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(gain * RATE[int(steps)] * v)
            steps += gain
            gains.append(gain)
        history.append({"adascale_gain": gain, "adascale_steps": steps})
        if square > 0:
            history[-1]["gradient_noise_scale"] = 4 * variance / square
    return module, history, gains


@every("bucket_mb", [25, 0.0001])
def test_it_is_the_papers_algorithm_with_its_schedule_in_steps_of_one_worker(
    bucket_mb: float,
) -> None:
    data = classification([16, 16, 16])
    job = make_job(
        mlp(),
        strategy=AdaScale(bucket_mb),
        optimizer=SGD,
        scheduler=partial(StepLR, step_size=3, gamma=0.8),
        scheduler_every="step",
        epochs=2,
    )
    outcome = run_world(job, data.shards(), ranks_as="processes")
    module, history, gains = by_hand(data, 3, 2)
    assert 1.2 < min(gains) < 2.8  # or all this would be as well without it
    assert relative_error(outcome.module, module) < 1e-9
    for summary, expected in zip(outcome.history, history, strict=True):
        assert summary.measured == pytest.approx(expected, rel=1e-9)


def test_workers_of_unequal_rows_and_steps_of_several_minibatches_are_weighed_as_they_are() -> None:
    """tr(Sigma) is (mean |g_i|^2 - |g|^2) / (mean 1/n_i - 1/n) of minibatches of n_i rows."""
    data = classification([22, 13])
    job = make_job(mlp(), strategy=AdaScale(accumulate=2, decay=0.5), optimizer=SGD, epochs=1)
    outcome = run_world(job, data.shards(), ranks_as="processes")
    module = mlp().train()
    parameters = list(module.parameters())
    optimizer = SGD(parameters)
    plans = [batches_by_hand(data, worker, 1, 4) for worker in range(2)]
    noise, signal, worth, gain = 0.0, 0.0, 0.0, 1.0
    for start in range(0, 6, 2):
        parts = [part for plan in plans for part in plan[start : start + 2]]
        counts = [len(targets) for _, targets in parts]
        rows, squares, mean = sum(counts), [], [torch.zeros_like(p) for p in parameters]
        for features, targets in parts:
            loss = nn.functional.cross_entropy(
                module(torch.from_numpy(features)), torch.from_numpy(targets)
            )
            each = torch.autograd.grad(loss, parameters)
            squares.append(sum(float(g.square().sum()) for g in each))
            for total, g in zip(mean, each, strict=True):
                total += g * len(targets) / rows
        norm = sum(float(g.square().sum()) for g in mean)
        now = (np.mean(squares) - norm) / (np.mean([1 / n for n in counts]) - 1 / rows)
        noise, signal = (noise + now) / 2, (signal + norm - now / rows) / 2
        kept = max(signal, 0.0)
        # At the end one worker has rows left for two minibatches, as many as for a step of its own.
        gain = (noise / 8 + kept) / (noise / rows + kept) if rows > 8 else 1.0
        for parameter, g in zip(parameters, mean, strict=True):
            parameter.grad = g
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * gain
        optimizer.step()
        worth += gain
    assert relative_error(outcome.module, module) < 1e-9
    assert outcome.history[0].measured["adascale_steps"] == pytest.approx(worth, rel=1e-9)


class Embeds(nn.Module):
    """A table whose rows are chosen by a feature's sign, and a layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(2, 3, sparse=sparse).double()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """From features of shape (rows, width) to (rows, 3)."""
        outputs: torch.Tensor = self.linear(self.table((features[:, 0] > 0).long()))
        return outputs


def test_sparse_gradients_are_measured_as_dense_ones() -> None:
    shards = classification([16, 16]).shards()
    modules = [
        run_world(
            make_job(partial(Embeds, sparse), strategy=AdaScale()), shards, ranks_as="processes"
        ).module
        for sparse in (True, False)
    ]
    assert relative_error(*modules) < 1e-12


def test_rounded_gradients_do_not_round_what_is_measured() -> None:
    """Their squares would be, to three digits, and of these the difference counts."""
    data = classification([16, 16])
    measured = [
        run_world(
            make_job(mlp(), strategy=AdaScale(compression=rounding), optimizer=SGD),
            data.shards(),
            ranks_as="processes",
        )
        .history[0]
        .measured["adascale_steps"]
        for rounding in (None, "bf16")
    ]
    assert measured[1] == pytest.approx(measured[0], rel=0.02)


def test_a_square_that_does_not_fit_is_infinite_and_never_in_the_gradients() -> None:
    numbers = iter([2.5, 1e200, math.inf])
    scalar = PiggybackedScalar(lambda: next(numbers), torch.float32)
    told = []
    for _ in range(3):
        (scalar() * 7).backward()
        assert torch.isfinite(scalar.slot.grad).all()
        told.append(scalar.take_sum(3))
    assert told == [7.5, math.inf, math.inf]


def bits(outcome: Outcome) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in outcome.module.parameters()]


def test_one_worker_trains_as_without_it() -> None:
    shards = classification([22]).shards()
    settings: dict[str, Any] = {
        "optimizer": SGD,
        "scheduler": partial(ExponentialLR, gamma=0.9),
        "scheduler_every": "step",
        "epochs": 2,
    }
    gained = run_world(make_job(mlp(), strategy=AdaScale(), **settings), shards)
    plain = run_world(make_job(mlp(), strategy=GradientAllReduce(), **settings), shards)
    assert bits(gained) == bits(plain)
    assert [row.measured for row in gained.history] == [
        {"adascale_steps": 6.0},
        {"adascale_steps": 12.0},
    ]


def test_a_step_that_kfac_clips_is_as_long_at_any_gain() -> None:
    # So short that all are clipped: to a length in which there is no rate.
    clipped = KFACPreconditioner(0.05, 0.9, 1, 1, kl_clip=1e-6)
    plain_sgd = partial(torch.optim.SGD, lr=0.1)
    shards = classification([16, 16]).shards()
    modules = [
        run_world(
            make_job(mlp(), strategy=strategy, optimizer=plain_sgd), shards, ranks_as="processes"
        ).module
        for strategy in (
            AdaScale(preconditioner=clipped),
            GradientAllReduce(preconditioner=clipped),
        )
    ]
    assert relative_error(*modules) < 1e-9


@every(("compression", "a_step"), [(None, []), ("bf16", [8])])
def test_what_is_measured_travels_with_the_gradients_unless_these_are_rounded(
    compression: Any, a_step: list[int], sent: list[tuple[str, torch.dtype, int]]
) -> None:
    sent.clear()
    job = make_job(mlp(), strategy=AdaScale(compression=compression), optimizer=SGD, epochs=2)
    run_world(job, classification([22]).shards())
    steps, at_an_epochs_end = 6, [3 * 8]
    measured = [octets for _, dtype, octets in sent if dtype is torch.float64]
    assert measured == (a_step * steps + at_an_epochs_end) * 2
