"""How noisy gradients are, estimated while training from norms that are at hand.

If independent rows have gradients with mean G and covariance Sigma, the squared norm of the mean
gradient of n rows is |G|^2 + tr(Sigma) / n on average. With the gradient g_i of each minibatch of
n_i rows, and the gradient g of all n rows of a step together, each step gives the unbiased
estimates

    tr(Sigma)  ~  (mean_i |g_i|^2 - |g|^2) / (mean_i 1/n_i - 1/n)
    |G|^2      ~  |g|^2 - tr(Sigma) / n

Single steps tell little. So running means of both are taken, bias-corrected like Adam's for
starting at 0, and divided only then (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1; Johnson et al. 2020, "AdaScale SGD"):

    noise scale  =  tr(Sigma) / |G|^2                      rows up to which larger steps pay off
    gain         =  (tr(Sigma) / m + |G|^2) / (tr(Sigma) / n + |G|^2)

where the gain is that of n rows over m: how many of one worker's steps a step of all is worth, from
1 where their gradients are the same to the number of workers where they are noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.strategies.all_reduce.chain import Step, Transform
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import HALVES, WorkerGroup

DECAY = 0.99
"""Decay of the running means, as in GPT-NeoX: they cover about the last hundred measured steps."""
EVERY = 10
"""Steps from one that is measured to the next, because measuring is costly."""
NOISE_SCALE = "gradient_noise_scale"
GAIN = "adascale_gain"


class GradientNoise:
    """Running means of tr(Sigma), the noise, and of |G|^2, the signal.

    Args:
        decay: the part of a mean that is left after a step, in [0, 1).

    Attributes:
        sums: what is saved of them.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        # Of the noise, of the signal, and of 1, as they all start at 0.
        self.sums = [0.0, 0.0, 0.0]

    def add(self, local: float, inverse_rows: float, mean: float, rows: int) -> None:
        """Add a step, unless its squares are not finite.

        Args:
            local: mean of the squared norms of some minibatches' gradients.
            inverse_rows: mean of 1 / their rows; more than 1 / ``rows``.
            mean: squared norm of the mean gradient of all rows.
            rows: how many these are.
        """
        noise = (local - mean) / (inverse_rows - 1 / rows)
        if math.isfinite(noise):
            now, part = (noise, mean - noise / rows, 1.0), 1 - self._decay
            self.sums = [
                kept + part * (new - kept) for kept, new in zip(self.sums, now, strict=True)
            ]

    @property
    def means(self) -> tuple[float, float] | None:
        """Estimates of tr(Sigma) and |G|^2, which may be negative; None before the first step."""
        noise, signal, counted = self.sums
        return (noise / counted, signal / counted) if counted else None


def noise_scale(noise: float, signal: float) -> float | None:
    """Rows up to which larger steps pay off.

    Args:
        noise: tr(Sigma).
        signal: |G|^2.

    Returns:
        None while the signal cannot be told from 0.
    """
    scale = max(noise, 0.0) / signal if signal > 0 else math.inf
    return scale if scale < math.inf else None


def gain(noise: float, signal: float, rows: float, base_rows: float) -> float:
    """How many steps on ``base_rows`` one on ``rows`` is worth, in [1, rows / base_rows].

    Args:
        noise: tr(Sigma); below 0 it counts as 0.
        signal: |G|^2; likewise.
        rows: of the step; no fewer than ``base_rows``.
        base_rows: of the step to compare with.
    """
    # Not before averaging: means of values that were clamped at 0 are too large.
    noise, signal = max(noise, 0.0), max(signal, 0.0)
    if not noise:
        return 1.0
    return (noise / base_rows + signal) / (noise / rows + signal)


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """One scalar per gradient, in float32 at least."""
    dense = [each.coalesce()._values() if each.is_sparse else each for each in gradients]
    wide = [each.float() if each.dtype in HALVES else each for each in dense]
    return list(torch._foreach_norm(wide))


def total_square(norms: Tensor) -> float:
    """The squared norm of all, rounded once, so that their order does not matter."""
    return math.fsum(each * each for each in norms.tolist())


class NoiseMeter(Transform):
    """Measures the noise of one worker's gradients in some steps; each worker has its own.

    Hooks on the parameters see the gradients of each minibatch before DistributedDataParallel adds
    them up. They are installed only in measured steps, so that others cost nothing.

    Args:
        run: this worker's.
        group: this worker among the others.
        decay: of the running means.

    Attributes:
        noise: the estimates.
    """

    def __init__(self, run: Run, group: WorkerGroup, decay: float) -> None:
        self.noise = GradientNoise(decay)
        self._run = run
        self._group = group
        self._hooks: list[Any] = []
        self._norms: list[Tensor] = []
        # Of each minibatch of this worker: the norms, the factor on its mean loss, and the rows.
        self._minibatches: list[tuple[Tensor, float, int]] = []

    @property
    def _due(self) -> bool:
        return self._run.step % EVERY == 0

    def before_forward(self, step: Step) -> None:
        """End the minibatch before."""
        self._end_minibatch(step)

    def before_backward(self, step: Step) -> None:
        """Look at the gradients that come now, unless there are no rows."""
        if step.batch is not None and self._due:
            parameters = self._run.replica.trainable()
            self._hooks = [each.register_hook(self._look_at) for each in parameters]  # type: ignore[no-untyped-call]

    def _look_at(self, gradient: Tensor) -> None:
        self._norms.extend(norms_of([gradient]))

    def _end_minibatch(self, step: Step) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        batch, weight = step.passes[-1]
        assert batch is not None
        self._minibatches.append((torch.stack(self._norms), weight, batch.examples))
        self._hooks, self._norms = [], []

    def after_reduction(self, step: Step) -> None:
        """Add what this worker's minibatches say."""
        squares, sizes = self._take(step)
        if sizes:
            self._add(squares, sizes, step)

    def _take(self, step: Step) -> tuple[float, list[int]]:
        """The sum of the squared norms of minibatches' mean gradients, and the rows of each."""
        self._end_minibatch(step)
        minibatches, self._minibatches = self._minibatches, []
        squares = [
            total_square(norms) / (self._mean_of(rows) * (weight or 1.0)) ** 2
            for norms, weight, rows in minibatches
        ]
        return sum(squares), [rows for *_, rows in minibatches]

    def _mean_of(self, rows: int) -> int:
        """What to divide a gradient of so many rows by, to have the mean of theirs."""
        return rows if self._run.replica.adds_losses else 1

    def _add(self, squares: float, sizes: Sequence[int], step: Step) -> None:
        """Add a step, given the sum of the squares of minibatches, and their rows."""
        gradients = [each.grad for each in self._run.replica.trainable() if each.grad is not None]
        count, rows = len(sizes), step.total
        mean = total_square(torch.stack(norms_of(gradients))) / self._mean_of(rows) ** 2
        inverse_rows = sum(1 / size for size in sizes) / count
        if inverse_rows * rows > 1 + 1e-9:  # else the mean is of this minibatch alone
            self.noise.add(squares / count, inverse_rows, mean, rows)

    def saved(self) -> dict[str, Any]:
        """The estimates."""
        return {"noise": self.noise.sums}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume with them."""
        self.noise.sums = saved["noise"]

    def measured(self) -> dict[str, float]:
        """Noise scale and gain by name, where known; all workers must ask for it together."""
        collective, means = self._group.collective, self.noise.means
        ours = [0.0, 0.0, 0.0] if means is None else [1.0, *means]
        sums = torch.tensor(ours, dtype=torch.float64, device=collective.device)
        workers, noise, signal = collective.all_reduce(sums).tolist()
        if not workers:
            return {}
        noise, signal = noise / workers, signal / workers
        base = self._group.rows_a_step
        found = {GAIN: gain(noise, signal, base * collective.world_size, base)}
        scale = noise_scale(noise, signal)
        return found if scale is None else {NOISE_SCALE: scale, **found}
