"""AdaScale: synchronous SGD whose learning rate follows the gain of many workers in each step.

Johnson, Agrawal, Gu, Guestrin 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed
Training" (arXiv 2007.05105), algorithm 1. Learning rate and schedule are those of one worker,
whatever the number S of workers. Where S times the rate would diverge, early on or where gradients
agree, the gain is small; later it approaches S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.all_reduce.gradient_noise import NoiseMeter, gain, total_square
from sparkdl.strategies.all_reduce.reducer import Paced, Reducer
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

    def start(self, run: Run) -> Reducer:
        """As in ``GradientAllReduce``, with steps that are worth more."""
        state = super().start(run)
        assert state.meter is not None
        state.paced = _Scaled(state.meter, state.group.rows_a_step)
        return state

    def _meter(self, run: Run, group: WorkerGroup) -> NoiseMeter:
        workers = group.collective.world_size
        decay = max(1 - workers / 1000, 0.0) if self.decay is None else self.decay
        return _AgreedNoise(run, group, decay)

    def saved_state(self, state: Reducer) -> Mapping[str, Any]:
        """What the noise was, and what the steps were worth."""
        assert isinstance(state.paced, _Scaled)
        return {**super().saved_state(state), "steps": state.paced.steps}

    def restore_state(self, state: Reducer, saved: Mapping[str, Any]) -> None:
        """Resume from there."""
        super().restore_state(state, saved)
        assert isinstance(state.paced, _Scaled)
        state.paced.steps = saved["steps"]

    def _measured(self, state: Reducer, meter: NoiseMeter) -> dict[str, float]:
        assert isinstance(state.paced, _Scaled)
        return {**super()._measured(state, meter), STEPS: state.paced.steps}


class _AgreedNoise(NoiseMeter):
    """Measures every step, and combines at once what the workers have measured."""

    _due = True

    def end_step(self, rows: Sequence[int]) -> bool:
        """Note the step's gradients."""
        collective, size = self._group.collective, self._run.batch_size
        mine, self._minibatches = self._minibatches, []
        ours = torch.tensor([sum(each.square for each in mine)], dtype=torch.float64)
        local = collective.all_reduce(ours.to(collective.device)).item()
        minibatches = [min(size, n - start) for n in rows for start in range(0, n, size)]
        count, inverse_rows = len(minibatches), sum(1 / n for n in minibatches)
        mean = total_square(self._mean_norms())
        self._add(local / count, inverse_rows / count, mean, sum(rows))
        return math.isfinite(mean)


class _Scaled(Paced):
    """Steps at one worker's learning rate times the gain.

    Args:
        meter: measures the noise.
        base_rows: rows of one worker in a step.

    Attributes:
        steps: how many of one worker's steps those until now were worth.
    """

    def __init__(self, meter: NoiseMeter, base_rows: int) -> None:
        self.steps = 0.0
        self._noise = meter.noise
        self._base_rows = base_rows

    def gain(self, rows: int) -> float:
        """The gain by the noise; 1 for one worker's rows, which may remain at an epoch's end."""
        means = self._noise.means
        if means is None or rows <= self._base_rows:
            return 1.0
        return gain(*means, rows, self._base_rows)

    def taken(self, replica: Replica, worth: float) -> None:
        """Advance the schedule."""
        self.steps += worth
        replica.schedule.lead_to(int(self.steps))
