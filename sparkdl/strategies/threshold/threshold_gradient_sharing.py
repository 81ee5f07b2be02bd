"""Gradient sharing: workers send each other only changes that are large enough.

Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", as in
Deeplearning4j's SharedTrainingMaster. ``threshold_encoding`` has the encoding, ``averager.sparse``
what is sent. In Strom's paper changes are added: that equals this with learning rate and threshold
multiplied by the number of workers. All workers take part in every round, so that replicas stay
equal and the same seed gives the same bits; Strom's, and Deeplearning4j's, do not wait.

A round in the driver (``aggregation="driver"``) sends the q_r up and the change of c down. Among
the workers (``"executors"``), each sends its q_r to every other, the paper's mesh, and the driver
receives a copy of c at the end of each epoch.

Floating-point buffers (BatchNorm's statistics) become the workers' mean, unencoded, and integers
the first worker's. The optimizer's state stays with the workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparkdl.arguments import convert_numbers
from sparkdl.averager.values.finite import require_finite
from sparkdl.averager.values.sparse import Sparse
from sparkdl.averager.values.wire_format import FullPrecision, SparseChanges, WireFormat, as_held
from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.strategies.arguments import is_number, require_period, require_steps
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.threshold.threshold_encoding import Encoding, ThresholdEncoder
from sparkdl.strategies.worker_group import WorkerGroup


@dataclass(frozen=True)
class ThresholdGradientSharing(Strategy["_Sharing"]):
    """Send the part of each change that is above a threshold, and keep the rest for later.

    Rule:
        After every ``period`` local steps, in which worker r went from the center c to w_r on n_r
        examples, with its residual r_r and its threshold t_r::

            r_r  <-  r_r + w_r - c
            q_r  <-  sign(r_r) * t_r where |r_r| >= t_r, else 0
            r_r  <-  r_r - q_r
            c    <-  c + sum_r n_r * q_r / sum_r n_r              w_r  <-  c

    Phases:
        1. Each worker trains for ``period`` steps, adds its change to its residual, and takes out
           of that what is above its threshold.
        2. It sends that to the driver or to every other worker.
        3. The mean of all, in the order of ranks, moves the center; all wait for it.
        4. Thresholds and residuals are adapted by how much was sent; all go on from the center.

    When:
        On slow links, for models of millions of parameters that are synchronized in every step:
        with the default settings a message has a thousandth of the bytes or less.

    When not:
        Where ``OuterOptimizer`` with a long period does as well, since its rounds are rarer and its
        replicas lose nothing; nor for small models, where the messages' latency dominates a round.

    Residuals are in checkpoints. If a lost worker comes back alone, its residual is gone, at most
    ``clip * threshold`` per entry; so is what is left in residuals when the fit ends.

    Args:
        threshold: the size at which an entry of a change, learning rate included, is sent, and the
            amount that is sent; Deeplearning4j's examples have 1e-3, and it adapts. 0 sends
            everything, which is parameter averaging after ``period`` steps.
        sparsity: the range for the part of the entries in a message; the threshold doubles in 20
            messages with more, and halves in 20 with fewer. Deeplearning4j's is (1e-4, 1e-2). None
            keeps the threshold constant, as Strom does.
        clip: the number of thresholds to which every fifth message clips the residual, 5 by
            default, both as in Deeplearning4j: old changes must not explode. None keeps everything.
        shake_every: after this many messages, one has a third of the threshold, to release small
            entries; None for none, Deeplearning4j's default.
        period: local steps between two exchanges, >= 1; 1 in the paper.
        aggregation: ``driver`` forms the center in the driver; a lost worker affects no other.
            ``executors`` has each worker send to all others over NCCL (gloo on CPUs): for few
            workers with a fast network between them. It needs a gang-scheduled start, in Spark's
            barrier mode; if one is lost, all are restarted from the driver's last copy.
        commit_every: with ``executors``, steps after which the driver takes an extra copy, rounded
            up to whole periods, and so the most that are repeated after the loss of a worker.

    Raises:
        ConfigError: an argument is out of range.
    """

    threshold: float = 1e-3
    sparsity: tuple[float, float] | None = (1e-4, 1e-2)
    clip: float | None = 5.0
    shake_every: int | None = None
    period: int = 1
    aggregation: Literal["driver", "executors"] = "driver"
    commit_every: int | None = None

    def __post_init__(self) -> None:
        convert_numbers(self)
        if not is_number(self.threshold) or not 0 <= self.threshold < math.inf:
            raise ConfigError(
                f"threshold must be a number > 0, or 0 to send everything, got {self.threshold!r}"
            )
        if not _is_sparsity(self.sparsity):
            raise ConfigError(
                "sparsity must be None or two numbers, the smallest and largest share of "
                f"entries in a message, such as (1e-4, 1e-2), got {self.sparsity!r}"
            )
        if self.clip is not None and (not is_number(self.clip) or not 1 <= self.clip < math.inf):
            raise ConfigError(
                f"clip must be None or a number of thresholds >= 1, got {self.clip!r}"
            )
        require_steps("shake_every", self.shake_every)
        require_steps("commit_every", self.commit_every)
        require_period(self.period)
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"aggregation must be 'driver' or 'executors', got {self.aggregation!r}"
            )
        if self.commit_every is not None and self.aggregation == "driver":
            raise ConfigError(
                "commit_every is for aggregation='executors'; the driver has every round's center"
            )

    @property
    def wire_format(self) -> WireFormat:
        """Sparse; the driver's copy of what executors have agreed on is complete."""
        return SparseChanges() if self.aggregation == "driver" else FullPrecision()

    @property
    def needs(self) -> Needs:
        """Only the driver, if the center is formed there."""
        among_workers = self.aggregation == "executors"
        return Needs(
            exchanges_optimizer_state=False,
            collective=among_workers,
            gang_start=among_workers,
            equal_steps=among_workers,
            resumes_alone=not among_workers,
        )

    def start(self, run: Run) -> _Sharing:
        """Begin at the center, with nothing left over."""
        return AGGREGATIONS[self.aggregation](run, self)

    def saved_state(self, state: _Sharing) -> Mapping[str, Any]:
        """The residual, and the threshold of the next message."""
        return state.saved()

    def restore_state(self, state: _Sharing, saved: Mapping[str, Any]) -> None:
        """Resume with both."""
        state.restore(saved)

    def rows_changed(self, run: Run, state: _Sharing) -> None:
        """Find out how many windows all workers have now."""
        state.rows_changed(run)

    def after_step(self, run: Run, state: _Sharing, batch: Batch) -> None:
        """Exchange after every ``period`` steps; the epoch's last window is ``end_epoch``'s."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            state.exchange(run)

    def end_epoch(self, run: Run, state: _Sharing) -> None:
        """Exchange the tail, 0 to ``period`` steps, and take the epoch's final center."""
        state.finish(run)


class _Sharing(ABC):
    """One worker's part.

    Args:
        run: the worker's; its replica holds the center.
        strategy: says how to encode, and where the center is formed.

    Attributes:
        encoder: encodes its parameters.
    """

    def __init__(self, run: Run, strategy: ThresholdGradientSharing) -> None:
        layout = run.replica.layout(with_optimizer=False)
        self._is_encoded = [segment.kind == "parameters" and segment.averaged for segment in layout]
        self._center = [
            values.detach().to("cpu", segment.center_dtype, copy=True)
            for segment, values in zip(layout, self._mine(run), strict=True)
        ]
        encoding = Encoding(
            strategy.threshold, strategy.sparsity, strategy.clip, strategy.shake_every
        )
        self.encoder = ThresholdEncoder(encoding, self._encoded(self._center))

    def saved(self) -> dict[str, Any]:
        """For ``restore``."""
        return self.encoder.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        self.encoder.restore(saved)

    def rows_changed(self, run: Run) -> None:  # noqa: B027 - not all need to know
        """Note that the workers have other rows."""

    @abstractmethod
    def exchange(self, run: Run) -> None:
        """Take part in the next round."""

    @abstractmethod
    def finish(self, run: Run) -> None:
        """Take part in all remaining rounds of the epoch."""

    def _find_shares(self, run: Run, window: WindowReport, out: Sequence[Tensor]) -> None:
        """Write what to send for a window into ``out``, which may be the center."""
        mine = self._mine(run)
        for values in mine:
            # NaN is not above the threshold either, and would stay forever.
            require_finite(values, window)
        learned, known, shares = map(self._encoded, (mine, self._center, out))
        held = [as_held(c, v.dtype) for c, v in zip(known, learned, strict=True)]
        self.encoder.encode(learned, held, shares)
        parts = zip(mine, self._center, out, self._is_encoded, strict=True)
        for values, center, share, is_encoded in parts:
            if not is_encoded:
                here = values.detach().to("cpu", center.dtype)
                if here.is_floating_point():
                    torch.sub(here, center, out=share)
                else:
                    share.copy_(here)

    def _take_center(self, run: Run) -> None:
        for values, center in zip(self._mine(run), self._center, strict=True):
            values.copy_(center)

    def _encoded(self, segments: Sequence[Tensor]) -> list[Tensor]:
        return [s for s, encoded in zip(segments, self._is_encoded, strict=True) if encoded]

    def _mine(self, run: Run) -> list[Tensor]:
        return run.replica.segments(with_optimizer=False)


class _ThroughDriver(_Sharing):
    """Each worker contributes what it shares to the driver's rounds."""

    def exchange(self, run: Run) -> None:
        """Contribute the window."""
        self._contribute(run, last=False)

    def finish(self, run: Run) -> None:
        """Contribute the last window."""
        self._contribute(run, last=True)

    def _contribute(self, run: Run, *, last: bool) -> None:
        # Without rows, nothing is sent, so nothing may leave the residual.
        if run.examples:
            self._find_shares(run, run.window(), self._center)
        run.averager.exchange(self._center, run.close_window(last=last))
        self._take_center(run)


class _AmongWorkers(_Sharing):
    """Each worker sends to all others, even after it has used up its rows."""

    def __init__(self, run: Run, strategy: ThresholdGradientSharing) -> None:
        super().__init__(run, strategy)
        self._group = WorkerGroup(run, run.batch_size)
        self._period = strategy.period
        self._commit_every = strategy.commit_every
        self._shares = [torch.zeros_like(values) for values in self._center]
        # The driver is sent the center in the replicas' precision.
        self._rounded = [
            index
            for index, (values, center) in enumerate(
                zip(self._mine(run), self._center, strict=True)
            )
            if values.dtype != center.dtype
        ]

    def saved(self) -> dict[str, Any]:
        """For ``restore``; the center too if nobody else has it without rounding."""
        centers = {f"center.{index}": self._center[index] for index in self._rounded}
        return super().saved() | centers

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``."""
        super().restore(saved)
        for index in self._rounded:
            self._center[index].copy_(saved[f"center.{index}"])

    def rows_changed(self, run: Run) -> None:
        """Find out how many windows all workers have now."""
        self._group.agree(run)

    def exchange(self, run: Run) -> None:
        """Exchange with all others, and commit if that is due."""
        group = self._group
        window = range(group.steps, group.steps + self._period)
        self._share(run, group.examples_of(window))
        self._take_center(run)
        group.steps = window.stop
        group.heartbeat(run)
        group.commit_if_due(run, self._commit_every, lambda: self._mine(run))

    def finish(self, run: Run) -> None:
        """Take part in all remaining rounds, and commit."""
        while not self._group.done:
            self.exchange(run)
        self._group.commit(run, self._mine(run), last=True)

    def _share(self, run: Run, examples: Sequence[int]) -> None:
        """Form the center from everyone's shares, on each worker in the same order."""
        collective = self._group.collective
        if examples[collective.index]:
            self._find_shares(run, run.window(), self._shares)
        messages = [_message(share) for share in self._shares]
        if not examples[collective.index]:
            messages = [message[:0] for message in messages]
        mine = torch.tensor([len(message) for message in messages])
        lengths = [sizes.tolist() for sizes in self._everyones(mine)]
        room = torch.zeros(max(map(sum, lengths)), dtype=torch.uint8)
        torch.cat(messages, out=room[: sum(lengths[collective.index])])
        bodies = self._everyones(room)
        first, total = next(i for i, count in enumerate(examples) if count), sum(examples)
        for index, count in enumerate(examples):
            if not count:
                continue
            parts = torch.split(bodies[index][: sum(lengths[index])], lengths[index])
            for center, part in zip(self._center, parts, strict=True):
                if center.is_floating_point():
                    Sparse(center.dtype).add(part, center.numpy(), count / total)
                elif index == first:
                    center.copy_(part.clone().view(center.dtype))

    def _everyones(self, mine: Tensor) -> list[Tensor]:
        collective = self._group.collective
        return [each.cpu() for each in collective.all_gather(mine.to(collective.device))]


def _message(share: Tensor) -> Tensor:
    if not share.is_floating_point():
        return share.view(torch.uint8)
    return Sparse(share.dtype).pack(share)


AGGREGATIONS: dict[str, type[_Sharing]] = {
    "driver": _ThroughDriver,
    "executors": _AmongWorkers,
}
"""Implementations, by the value of ``aggregation`` in ``ThresholdGradientSharing``."""


def _is_sparsity(value: object) -> bool:
    if value is None:
        return True
    pair = isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))
    return pair and 0 < value[0] <= value[1] <= 1  # type: ignore[index]
