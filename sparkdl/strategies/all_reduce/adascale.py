"""AdaScale: synchronous SGD whose learning rate follows the gain of many workers in each step.

Johnson, Agrawal, Gu, Guestrin 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed
Training" (arXiv 2007.05105), algorithm 1. Learning rate and schedule are those of one worker,
whatever the number S of workers. Where S times the rate would diverge, early on or where gradients
agree, the gain is small; later it approaches S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.chain import Step
from sparkdl.strategies.all_reduce.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.all_reduce.gradient_noise import NoiseMeter, gain
from sparkdl.strategies.arguments import FRACTION, argument, must, or_none
from sparkdl.strategies.base import Needs, Run
from sparkdl.strategies.worker_group import WorkerGroup

STEPS = "adascale_steps"


@dataclass(frozen=True)
class AdaScale(GradientAllReduce):
    """``GradientAllReduce`` at the learning rate and the schedule of one worker.

    Rule:
        With S workers whose mean gradients g_i of m rows each have the mean g, and running means
        with the decay max(1 - S / 1000, 0), corrected for their start::

            variance  <-  running mean of (mean_i |g_i|^2 - |g|^2) * S / (S - 1)
            square    <-  running mean of |g|^2 - the same estimate / S
            gain      <-  (variance + square) / (variance / S + square)           from 1 to S
            w         <-  optimizer step on g at gain * (rate of the schedule at floor(steps))
            steps     <-  steps + gain

    Phases:
        1. As in ``GradientAllReduce``, up to the gradients' mean.
        2. The workers add up the squares of their own gradients, which gives the gain.
        3. All step at the learning rate times the gain, and the schedule advances by the gain.

    When:
        For SGD, with or without momentum, that was tuned on one worker and is to run on any number
        of them without further tuning.

    When not:
        For Adam and others that divide by the size of the gradients, for which the rule was not
        derived; nor to train on all rows as many times as before: to finish sooner, divide
        ``epochs`` by about the gain, or end the fit by ``adascale_steps``.

    The learning rate is multiplied by the gain, and a schedule by step (``schedulerEvery="step"``)
    advances by the gain for each optimizer step; one by epoch follows the epochs. Each epoch's
    ``measured`` has ``adascale_gain`` as it was at its end, and ``adascale_steps``, how many of one
    worker's steps those since the start were worth.

    Args:
        bucket_mb, compression, shard_optimizer, commit_every: as in ``GradientAllReduce``.
        find_unused_parameters, sync_batch_norm, preconditioner, reduction: likewise.
        accumulate: minibatches in each worker's step, to which the gain is relative; 1 in the
            paper.
        measure_noise: always on.
        shard_parameters, hybrid: False and None, as the noise is measured on whole gradients.
        decay: of the running means, in [0, 1); None for the paper's max(1 - S / 1000, 0).

    Raises:
        ConfigError: an argument is out of range.
    """

    measure_noise: bool = argument(
        True, must("True, as AdaScale needs the gradient noise", lambda value: value is True)
    )
    decay: float | None = argument(None, or_none(FRACTION))

    @property
    def needs(self) -> Needs:
        """As in ``GradientAllReduce``, except for the schedule."""
        return replace(super().needs, leads_schedule=True)

    def require_fits(self, replica: Replica) -> None:
        """Check that there is a learning rate to multiply."""
        super().require_fits(replica)
        if any("lr" not in group for group in replica.optimizer.param_groups):
            raise ConfigError(
                f"{type(replica.optimizer).__name__} has no learning rate named 'lr' for "
                "AdaScale to scale. Use SGD, or GradientAllReduce"
            )

    def _meter(self, run: Run, group: WorkerGroup) -> NoiseMeter:
        workers = group.collective.world_size
        decay = max(1 - workers / 1000, 0.0) if self.decay is None else self.decay
        return _Scaled(run, group, decay)


class _Scaled(NoiseMeter):
    """Measures every step, combines at once what the workers have measured, and sets the gain."""

    _due = True
    _worth = 0.0
    """How many of one worker's steps those until now were worth."""

    def after_reduction(self, step: Step) -> None:
        """Add all workers' minibatches; one worker's rows may remain at an epoch's end."""
        collective, size = self._group.collective, self._run.batch_size
        ours = torch.tensor([self._take(step)[0]], dtype=torch.float64)
        squares = collective.all_reduce(ours.to(collective.device)).item()
        sizes = [min(size, n - start) for n in step.rows for start in range(0, n, size)]
        self._add(squares, sizes, step)
        means, base = self.noise.means, self._group.rows_a_step
        self._gain = 1.0
        if means is not None and step.total > base:
            self._gain = gain(*means, step.total, base)
            # A sum of losses has grown with the rows already.
            step.gain = self._gain * self._mean_of(base) / self._mean_of(step.total)

    def after_update(self, step: Step) -> None:
        """Advance the schedule."""
        self._worth += self._gain
        self._run.replica.schedule.lead_to(int(self._worth))

    def saved(self) -> dict[str, Any]:
        """What the noise was, and what the steps were worth."""
        return {**super().saved(), "steps": self._worth}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from there."""
        super().restore(saved)
        self._worth = saved["steps"]

    def measured(self) -> dict[str, float]:
        """As of the noise, and what the steps were worth."""
        return {**super().measured(), STEPS: self._worth}
