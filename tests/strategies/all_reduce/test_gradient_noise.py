"""The noise of gradients, and AdaScale."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from torch import nn
from torch.optim.lr_scheduler import StepLR
from toys import Data, batches_by_hand, classification, make_job, mlp, relative_error

from sparkdl.averager.headers import received, window_header
from sparkdl.averager.run_events import Progress
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport
from sparkdl.report.history import metrics_of
from sparkdl.strategies import AdaScale, GradientAllReduce, KFACPreconditioner
from sparkdl.strategies.all_reduce.gradient_noise import GradientNoise, gain, noise_scale
from sparkdl.testing import run_world

WINDOW = WindowReport(rank=0, epoch=1, step=1, examples=2, loss_sum=0.5, last=True)


@every("rows", [(8,) * 8, (4, 12, 16)])
def test_the_noise_scale_is_the_trace_of_the_covariance_over_the_squared_gradient(
    rows: tuple[int, ...],
) -> None:
    generator = np.random.default_rng(0)
    gradient = generator.normal(size=300) / 10
    deviations = np.linspace(0.2, 1.8, 300)  # of a covariance that is no multiple of one
    true = np.sum(deviations**2) / np.sum(gradient**2)
    noise, total = GradientNoise(decay=0.9999), sum(rows)
    for _ in range(4000):
        each = [gradient + generator.normal(size=300) * deviations / math.sqrt(n) for n in rows]
        mean = sum(n * g for n, g in zip(rows, each, strict=True)) / total
        local = np.mean([g @ g for g in each])
        noise.add(local, float(np.mean([1 / n for n in rows])), mean @ mean, total)
    assert noise.means is not None
    found = noise_scale(*noise.means)
    assert found == pytest.approx(true, rel=0.03)
    expected = (true / 8 + 1) / (true / 64 + 1)
    assert gain(*noise.means, rows=64, base_rows=8) == pytest.approx(expected, rel=0.03)


def test_equal_gradients_gain_nothing_and_noise_as_much_as_there_are_workers() -> None:
    assert gain(0.0, 2.0, rows=32, base_rows=4) == 1.0
    assert gain(-0.1, 2.0, rows=32, base_rows=4) == 1.0
    assert gain(2.0, 0.0, rows=32, base_rows=4) == 8.0
    assert gain(2.0, -0.1, rows=32, base_rows=4) == 8.0
    assert gain(4.0, 1.0, rows=8, base_rows=4) == pytest.approx(2 / 1.5)


def test_of_a_gradient_that_cannot_be_told_from_0_there_is_no_noise_scale() -> None:
    assert noise_scale(1.0, 0.0) is None
    assert noise_scale(1.0, -1.0) is None
    assert noise_scale(1e10, 1e-300) is None
    assert noise_scale(-1.0, 1.0) == 0.0


def test_a_step_whose_squares_overflow_does_not_count() -> None:
    noise = GradientNoise(decay=0.9)
    noise.add(local=5.0, inverse_rows=1 / 2, mean=3.0, rows=4)
    noise.add(local=math.inf, inverse_rows=1 / 2, mean=3.0, rows=4)
    noise.add(local=math.inf, inverse_rows=1 / 2, mean=math.inf, rows=4)
    assert noise.means == pytest.approx((8.0, 1.0))


def squared_norms(module: nn.Module, parts: list[Any]) -> tuple[list[float], float]:
    """Of each worker's mean gradient and of that of all rows, which is left on the module."""
    local, sums = [], [torch.zeros_like(p) for p in module.parameters()]
    total = sum(len(targets) for _, targets in parts)
    for features, targets in parts:
        module.zero_grad()
        outputs = module(torch.from_numpy(features))
        nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        local.append(sum(float(g.square().sum()) for g in gradients))
        for each, gradient in zip(sums, gradients, strict=True):
            each += gradient * len(targets) / total
    for parameter, gradient in zip(module.parameters(), sums, strict=True):
        parameter.grad = gradient
    return local, sum(float(g.square().sum()) for g in sums)


def measured_by_hand(data: Any, epochs: int, accumulate: int = 1) -> list[dict[str, float]]:
    """SGD at 0.1 in one process, minibatches of 4 rows; every tenth step is measured."""
    module, found, step, workers = mlp().train(), [], 0, len(data.sizes)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    estimates: list[list[tuple[float, float]]] = [[] for _ in range(workers)]
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in range(workers)]
        for start in range(0, max(map(len, plans)), accumulate):
            mine = [plan[start : start + accumulate] for plan in plans]
            parts = [part for each in mine for part in each]
            squares, mean = squared_norms(module, parts)
            optimizer.step()
            step += 1
            counts = [len(targets) for _, targets in parts]
            pairs = iter(zip(squares, counts, strict=True))
            for rank in range(workers):
                own = [next(pairs) for _ in mine[rank]]
                if step % 10 or not own or len(parts) == 1:
                    continue
                inverse = np.mean([1 / count for _, count in own])
                noise = (np.mean([square for square, _ in own]) - mean) / (
                    inverse - 1 / sum(counts)
                )
                estimates[rank].append((noise, mean - noise / sum(counts)))
        weighted = [
            np.average(each, axis=0, weights=0.99 ** np.arange(len(each))[::-1])
            for each in estimates
        ]
        noise, signal = np.mean(weighted, axis=0)
        noise, kept = max(noise, 0.0), max(signal, 0.0)
        rows = 4 * accumulate
        found.append({"adascale_gain": (noise / rows + kept) / (noise / (rows * workers) + kept)})
        if signal > 0:
            found[-1]["gradient_noise_scale"] = noise / signal
    return found


def test_a_training_tells_them_of_each_epoch_and_is_the_same_for_it() -> None:
    data = classification([46, 37])
    job = make_job(mlp(), strategy=GradientAllReduce(measure_noise=True), epochs=2)
    outcome = run_world(job, data.shards(), ranks_as="processes")
    expected = measured_by_hand(data, 2)
    assert any("gradient_noise_scale" in values for values in expected)
    for summary, values in zip(outcome.history, expected, strict=True):
        assert summary.measured == pytest.approx(values, rel=1e-9)
        assert summary.measured.items() <= metrics_of(summary).items()
    plain = run_world(
        make_job(mlp(), strategy=GradientAllReduce(), epochs=2), data.shards(), ranks_as="processes"
    )
    assert [summary.measured for summary in plain.history] == [{}, {}]
    pairs = zip(outcome.module.parameters(), plain.module.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_one_worker_compares_the_minibatches_of_a_step() -> None:
    data = classification([80])
    strategy = GradientAllReduce(measure_noise=True, accumulate=2)
    outcome = run_world(make_job(mlp(), strategy=strategy), data.shards())
    expected = measured_by_hand(data, 1, accumulate=2)
    assert outcome.history[0].measured == pytest.approx(expected[0], rel=1e-9)


def test_one_minibatch_has_nothing_to_be_compared_with() -> None:
    job = make_job(mlp(), strategy=GradientAllReduce(measure_noise=True))
    assert run_world(job, classification([40]).shards()).history[0].measured == {}


@every_row(
    [], {"a": "1"}, {"a": True}, {"a": math.inf}, {"a" * 65: 1.0}, {str(k): 1 for k in range(17)}
)
def test_what_no_strategy_measures_is_refused(measured: Any) -> None:
    header = window_header(WINDOW)
    header["window"]["measured"] = measured
    with pytest.raises(TrainingError, match="rank 0 sent"):
        received(WindowReport, header["window"], 0)
    progress = copy.deepcopy(Progress.start(1).as_json())
    progress["sums"] = [{"rank": 0, "measured": measured}]
    with pytest.raises(TypeError, match="measured is"):
        Progress.from_json(progress)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


KFAC = GradientAllReduce(preconditioner=KFACPreconditioner(0.05, 0.9, 2, 3, 0.02))
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
            norms, norm = squared_norms(module, list(parts))
            now = (np.mean(norms) - norm) * workers / (workers - 1)
            variance = theta * variance + (1 - theta) * now
            square = theta * square + (1 - theta) * (norm - now / workers)
            # The correction for the start is the same for both means, and cancels.
            signal = max(square, 0.0)  # means of few steps may be less
            gain = (variance + signal) / (variance / workers + signal)
            with torch.no_grad():
                for p, v in zip(parameters, velocity, strict=True):
                    v.mul_(0.9).add_(p.grad)
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
    optimizer = SGD(module.parameters())
    plans = [batches_by_hand(data, worker, 1, 4) for worker in range(2)]
    noise, signal, worth, gain = 0.0, 0.0, 0.0, 1.0
    for start in range(0, 6, 2):
        parts = [part for plan in plans for part in plan[start : start + 2]]
        counts = [len(targets) for _, targets in parts]
        rows, (squares, norm) = sum(counts), squared_norms(module, parts)
        now = (np.mean(squares) - norm) / (np.mean([1 / n for n in counts]) - 1 / rows)
        noise, signal = (noise + now) / 2, (signal + norm - now / rows) / 2
        kept = max(signal, 0.0)
        # At the end one worker has rows left for two minibatches, as many as for a step of its own.
        gain = (noise / 8 + kept) / (noise / rows + kept) if rows > 8 else 1.0
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


@every("compression", [None, "bf16"])
def test_what_is_measured_takes_one_number_a_step(
    compression: Any, sent: list[tuple[str, torch.dtype, int]]
) -> None:
    sent.clear()
    job = make_job(mlp(), strategy=AdaScale(compression=compression), optimizer=SGD, epochs=2)
    run_world(job, classification([22]).shards())
    steps, at_an_epochs_end = 6, [3 * 8]
    measured = [octets for _, dtype, octets in sent if dtype is torch.float64]
    assert measured == ([8] * steps + at_an_epochs_end) * 2


@every("strategy, sizes", [(AdaScale(), [16, 16]), (KFAC, [16])])
@every_row(
    (nn.CrossEntropyLoss(weight=torch.full((3,), 0.1, dtype=torch.float64)), 0.1),
    (nn.CrossEntropyLoss(reduction="sum"), 0.1 / 4),
)
def test_its_steps_do_not_depend_on_what_the_loss_divides_by(
    strategy: GradientAllReduce, sizes: list[int], loss: nn.Module, rate: float
) -> None:
    """Weights that are all the same cancel, and a sum is four times the mean of a worker's rows."""
    mean, other = (
        run_world(
            make_job(mlp(), strategy=strategy, optimizer=partial(SGD, lr=lr), loss=of, epochs=2),
            classification(sizes).shards(),
            ranks_as="processes",
        )
        for of, lr in ((nn.CrossEntropyLoss(), 0.1), (loss, rate))
    )
    assert strategy is KFAC or 1.2 < mean.history[0].measured["adascale_gain"] < 1.9
    assert relative_error(other.module, mean.module) < 1e-9
    for mine, theirs in zip(other.history, mean.history, strict=True):
        assert mine.measured == pytest.approx(theirs.measured, rel=1e-9)
