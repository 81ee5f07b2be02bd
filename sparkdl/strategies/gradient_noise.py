"""How noisy gradients are, found out while training, from norms that are at hand.

Of independent rows whose gradients have the mean G and the covariance Sigma, the mean gradient of n
rows has on average the squared norm |G|^2 + tr(Sigma) / n. Worker r computes that of its n_r rows,
g_r, and all get that of all n rows, g, so each step tells, without bias,

    tr(Sigma)  ~  (mean_r |g_r|^2 - |g|^2) / (mean_r 1/n_r - 1/n)
    |G|^2      ~  |g|^2 - tr(Sigma) / n

Single steps tell little. Running means of both, corrected for having begun at 0 as Adam's are, and
divided only then, are what one asks for (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1; Johnson et al. 2020, "AdaScale SGD"):

    noise scale  =  tr(Sigma) / |G|^2                      rows, up to which larger steps pay
    gain         =  (tr(Sigma) / m + |G|^2) / (tr(Sigma) / n + |G|^2)

the gain being of n rows over m: how many steps of one worker a step of all is worth, from 1 where
their gradients are the same to the number of workers where they are noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.strategies.worker_group import WorkerGroup

DECAY = 0.99
"""Of the running means, as in GPT-NeoX: they are of the last hundred steps."""
NOISE_SCALE = "gradient_noise_scale"
GAIN = "adascale_gain"
WIDE = (torch.float32, torch.float64)
_UNREAD = 64
"""Steps after which numbers on a GPU are read: each time waits for it."""


class GradientNoise:
    """Running means of tr(Sigma), the noise, and of |G|^2, the signal.

    Args:
        decay: what is left of a mean after a step, in [0, 1).
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._noise = self._signal = self._counted = 0.0

    def add(self, local: float, inverse_rows: float, mean: float, rows: int) -> None:
        """Take note of a step, unless its squares are not finite, which they cease to be early.

        Args:
            local: squared norm of a worker's gradient, or the mean of several workers'.
            inverse_rows: 1 / that worker's rows, or the mean of theirs; more than 1 / ``rows``.
            mean: squared norm of the mean gradient of all rows.
            rows: how many these are.
        """
        noise = (local - mean) / (inverse_rows - 1 / rows)
        if not math.isfinite(noise):
            return
        part = 1 - self._decay
        self._noise += part * (noise - self._noise)
        self._signal += part * (mean - noise / rows - self._signal)
        self._counted += part * (1 - self._counted)

    @property
    def means(self) -> tuple[float, float] | None:
        """tr(Sigma) and |G|^2 as estimated, which may be negative; None before the first step."""
        if not self._counted:
            return None
        return self._noise / self._counted, self._signal / self._counted

    @property
    def saved(self) -> list[float]:
        """For ``restore``."""
        return [self._noise, self._signal, self._counted]

    def restore(self, saved: Sequence[float]) -> None:
        """Go on from what ``saved`` was."""
        self._noise, self._signal, self._counted = saved


def noise_scale(noise: float, signal: float) -> float | None:
    """Rows up to which larger steps pay.

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
    # Not before they are averaged: means of what is cut off at 0 are too large.
    noise, signal = max(noise, 0.0), max(signal, 0.0)
    if not noise:
        return 1.0
    return (noise / base_rows + signal) / (noise / rows + signal)


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """One a gradient, float64, shape (gradients,), on their device.

    Args:
        gradients: of any dtypes and shapes, dense or not.
    """
    dense = [each.coalesce()._values() if each.is_sparse else each for each in gradients]
    wide = [each if each.dtype in WIDE else each.float() for each in dense]
    return torch.stack([norm.double() for norm in torch._foreach_norm(wide)]).square_()


def _total(squares: Sequence[Tensor]) -> float:
    """Their sum; rounded once, so that it is the same in whatever order buckets have them."""
    return math.fsum(each for part in squares for each in part.tolist())


class NoiseMeter:
    """Measures the noise of one worker's gradients while they are reduced.

    Args:
        together: this worker among the others.
        decay: of the running means.
        every_step: whether the workers put together what they measure in each step, and so have
            the same estimates; else each has its own, until somebody asks.

    Attributes:
        noise: the estimates.
    """

    def __init__(self, together: WorkerGroup, decay: float, *, every_step: bool) -> None:
        self.noise = GradientNoise(decay)
        self._together = together
        self._every_step = every_step
        self._local: list[Tensor] = []
        self._unread: list[tuple[list[Tensor], float, Tensor, int]] = []

    def look_at(self, gradients: Sequence[Tensor]) -> None:
        """Look at one bucket before it is reduced.

        Args:
            gradients: this worker's share of those in it: times its rows and the number of workers,
                divided by the rows of all.
        """
        self._local.append(squared_norms(gradients))

    def end_step(self, mean: Tensor, rows: Sequence[int]) -> None:
        """Take note of a step whose gradients have been reduced.

        Args:
            mean: squared norms of the mean gradient, shape (parameters,).
            rows: of each worker in the step.
        """
        collective, total = self._together.collective, sum(rows)
        own, mine, self._local = self._local, rows[collective.index], []
        taking_part = [count for count in rows if count]
        if len(taking_part) < 2:
            return  # the mean is the one worker's
        if mine:
            torch._foreach_mul_(own, (total / (len(rows) * mine)) ** 2)
        if self._every_step:
            squares = torch.tensor([_total(own)], dtype=torch.float64, device=collective.device)
            local = float(collective.all_reduce(squares)) / len(taking_part)
            inverse_rows = sum(1 / count for count in taking_part) / len(taking_part)
            self.noise.add(local, inverse_rows, _total([mean]), total)
        elif mine:
            self._unread.append((own, 1 / mine, mean, total))
            if len(self._unread) == _UNREAD or mean.is_cpu:
                self.settle()

    def settle(self) -> None:
        """Read what is still on a GPU."""
        unread, self._unread = self._unread, []
        for local, inverse_rows, mean, rows in unread:
            self.noise.add(_total(local), inverse_rows, _total([mean]), rows)

    def measured(self) -> dict[str, float]:
        """Noise scale and gain by name, those there are; asked for by all workers together."""
        self.settle()
        collective, means = self._together.collective, self.noise.means
        ours = [0.0, 0.0, 0.0] if means is None else [1.0, *means]
        sums = torch.tensor(ours, dtype=torch.float64, device=collective.device)
        workers, noise, signal = collective.all_reduce(sums).tolist()
        if not workers:
            return {}
        noise, signal = noise / workers, signal / workers
        base = self._together.rows_a_step
        found = {GAIN: gain(noise, signal, base * collective.world_size, base)}
        scale = noise_scale(noise, signal)
        return found if scale is None else {NOISE_SCALE: scale, **found}
