"""What a fit has shown about its costs: the figures from which plans are made."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.phases import COMPUTE, DECODE, EXCHANGE, WAIT
from sparkdl.planner.traffic import Traffic
from sparkdl.untrusted import read

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a fit trains, and how.

    Attributes:
        model: the class of the model.
        strategy: how the replicas agree, as it describes itself.
        batch_size: rows per minibatch of each worker.
        aggregation: where means are formed, ``driver``, ``executors`` or ``hierarchical``; None if
            the strategy leaves no choice.
        traffic: what the replicas exchange; None if there is no formula for it.
        trained: numbers in the model that are trained.
        model_bytes: of the model's parameters and buffers.
    """

    model: str = ""
    strategy: str = ""
    batch_size: int = 1
    aggregation: str | None = None
    traffic: Traffic | None = None
    trained: int = 0
    model_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile(Fit):
    """What a fit has cost, without its first epoch if it had others: that one warms up.

    Attributes:
        machine: where the figures were taken, in words.
        workers: how many there were.
        hosts: on how many hosts.
        rows: of an epoch, all workers' together.
        worker_step_s: seconds that each worker computed and made minibatches in a step, by rank.
        round_s: seconds that an exchange held up the slowest worker, beyond its own steps.
        rounds: exchanges that this is the mean of.
        epoch_seconds: of the epochs that were counted.
    """

    machine: str
    workers: int
    hosts: int
    rows: int
    worker_step_s: tuple[float, ...]
    round_s: float
    rounds: int
    epoch_seconds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean over the workers that had rows."""
        busy = [each for each in self.worker_step_s if each > 0]
        return sum(busy) / len(busy)

    @property
    def slowest(self) -> float:
        """How many times as long as the mean the slowest worker takes, >= 1."""
        return max(self.worker_step_s) / self.step_s

    @property
    def per_host(self) -> int:
        """Workers on each host."""
        return math.ceil(self.workers / self.hosts)

    @property
    def only_computes(self) -> bool:
        """Whether a step's seconds hold no exchange, as those of several workers' gradients do."""
        in_backward = self.strategy.startswith(("GradientAllReduce(", "AdaScale("))
        if self.traffic is not None:
            in_backward = self.traffic.hidden == "backward"
        return self.workers == 1 or not in_backward

    @property
    def algorithm(self) -> str:
        """The strategy, but for where it forms its means."""
        return self.strategy.replace(f"aggregation={self.aggregation!r}", "aggregation=...")

    @property
    def spread(self) -> float | None:
        """Standard deviation of the epochs' seconds over their mean; None of fewer than three."""
        if len(self.epoch_seconds) < 3:
            return None
        return float(np.std(self.epoch_seconds, ddof=1) / np.mean(self.epoch_seconds))

    @classmethod
    def of(cls, recording: Any) -> Profile:
        """The profile of a fit, which may still be running.

        Args:
            recording: of the fit, a ``sparkdl.report.Recording``, which is above this package.

        Raises:
            ConfigError: it has no epoch that has ended, or no worker has said where its time went.
        """
        setup = recording.setup
        epochs = recording.history[recording.epochs_before :]
        before, rows_before = recording.before_training, np.zeros_like(recording.rows)
        warm = len(epochs) > 1 and recording.first_epoch is not None
        if warm and recording.first_epoch is not None:
            before, rows_before = recording.first_epoch
            epochs = epochs[1:]
        busy = (recording.seconds - before)[:, [COMPUTE, DECODE]].sum(axis=1)
        trained = recording.rows - rows_before
        rows = sum(each.examples for each in epochs) / max(len(epochs), 1)
        if not sum(each.rounds for each in epochs) or not rows or not busy.any():
            raise ConfigError(
                "there is nothing to plan from: no round of an epoch that has ended was recorded. "
                "Fit at least one epoch, better three, on a sample of the rows"
            )
        # Perhaps one epoch more has begun, whose rows and seconds are counted too.
        passes = float(trained.sum()) / rows
        steps = np.ceil(trained / passes / setup.batch_size)
        rounds = math.ceil(steps.max() / (1.0 if setup.traffic is None else setup.traffic.every))
        slowest = int(busy.argmax())
        if warm:
            waited = sum(each.seconds for each in epochs) / len(epochs) - busy[slowest] / passes
        else:  # the first epoch's seconds may include reading the rows
            waited = (recording.seconds - before)[slowest, [WAIT, EXCHANGE]].sum() / passes
        hosts = sorted({host for host in recording.hosts if host})
        return cls(
            **{each.name: getattr(setup, each.name) for each in fields(Fit)},
            machine=_machine(hosts),
            workers=recording.world_size,
            hosts=max(1, len(hosts)),
            rows=round(rows),
            worker_step_s=tuple((busy / passes / np.maximum(steps, 1)).tolist()),
            round_s=max(0.0, float(waited)) / rounds,
            rounds=rounds * len(epochs),
            epoch_seconds=tuple(each.seconds for each in epochs),
        )

    def to_json(self) -> str:
        """All of it as JSON, for ``from_json`` and ``jobs/plan.py``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile in a file of ``to_json``, or in the result of ``jobs/train.py``.

        Args:
            text: the file's.

        Raises:
            ConfigError: it has none.
        """
        try:
            told = json.loads(text)
            told = told.get("profile", told)
            if told["format"] != FORMAT:
                raise ConfigError(f"it has format {told['format']!r}, this version {FORMAT}")
            made: Profile = read(cls, {each.name: told[each.name] for each in fields(cls)})
            counts = [made.workers, made.hosts, made.batch_size, made.rows, made.rounds]
            seconds = [made.round_s, *made.worker_step_s, *made.epoch_seconds]
            if made.traffic is not None:
                counts += [made.traffic.period, made.traffic.fragments, made.traffic.buckets]
                seconds += [made.traffic.up, made.traffic.down, made.traffic.state]
            if not all(math.isfinite(x) and x >= 0 for x in seconds) or not made.step_s:
                raise ConfigError("its seconds or bytes are not numbers >= 0")
            if min(counts) < 1:
                raise ConfigError("its numbers of workers, rows and rounds are not >= 1")
            return made
        except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
            why = str(error) if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(
                f"this is no profile of a fit ({why:.200}): write one with "
                "open(path, 'w').write(model.summary.profile.to_json())"
            ) from error


def require_same(profiles: Sequence[Profile]) -> None:
    """Check that profiles are of one training.

    They may differ in workers, in minibatches, and in where means are formed.

    Raises:
        ConfigError: there is none, or they are of different models or strategies.
    """
    if not profiles:
        raise ConfigError("a plan needs at least one profile")
    first = profiles[0]
    for each in profiles[1:]:
        for name in ("model", "trained", "model_bytes", "algorithm"):
            ours, theirs = getattr(first, name), getattr(each, name)
            if ours != theirs:
                raise ConfigError(
                    f"the profiles are of different trainings: {name} is {ours!r:.200} in one and "
                    f"{theirs!r:.200} in another. Give those of one model and strategy, which may "
                    "differ in workers, batchSize and the strategy's aggregation"
                )


def _machine(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    system, cores = f"{platform.system()} {platform.machine()}", os.cpu_count()
    driver = f"{system}, {cores} cores, torch {version('torch')}"
    return f"workers on {shown or 'unnamed hosts'}; driver: {driver}"
