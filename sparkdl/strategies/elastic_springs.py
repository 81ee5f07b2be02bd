"""The replicas' ends of elastic averaging's springs, with the center in the driver or among them.

Where the workers sum among themselves, each keeps the center: with n replicas x_i and the moving
rate a, every worker that has the sum can compute

    center  <-  (1 - n * a) * center + a * sum_i x_i

A replica's own pull needs only the center as it was. So the sum can be under way while the workers
train on, up to the next round, without anything being stale. You, Buluc, Demmel 2017, "Scaling Deep
Learning on GPU and Knights Landing clusters", arrive at this in three steps: sums by a tree or ring
in place of one worker after another, a center where the replicas are, and overlap.

Hogwild elastic averaging, from the same paper: workers in threads read and write one center without
a lock, so that others may write between a worker's read and its own write (Niu et al. 2011,
"Hogwild!"). With c_i the center that worker i read last,

    d_i  <-  a * (x_i - c_i)          center  <-  center + d_i          c_i  <-  center, on its way

What differs: there, others may also write half of theirs, and an addition may be lost when two
happen at once; here one thread in the driver does it, so that each d_i is added whole and once, and
a read has some of them in full. The gain remains: nobody waits for anybody's round trip.

``NesterovMomentum`` is EAMSGD's, around any optimizer, with place and velocity kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.values.replica_codec import looks_finite, require_finite
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.base import Run, StepsAhead
from sparkdl.strategies.worker_group import HALVES, WorkerGroup

SWAPPED_AT_ONCE = 1 << 20
"""Values swapped at a time, so that a swap takes no third copy of the parameters."""


class Spring:
    """One replica's end of its spring. Between epochs the replica holds the center.

    Args:
        replica: the worker's.
        rate: the moving rate.
        momentum: of the replica's steps.
        from_last: whether the replica is pulled to the center that it received last, not to the one
            that it meets.
    """

    def __init__(
        self, replica: Replica, rate: float, momentum: float = 0.0, *, from_last: bool
    ) -> None:
        self._replica = replica
        self._rate = rate
        self._from_last = from_last
        self._kinds = [segment.kind for segment in replica.layout(with_optimizer=False)]
        # The last center received while the replica trains, else the replica's own values.
        self._other = [values.clone() for values in self._segments()]
        self._pull = [torch.zeros_like(values) for values in self._parameters(self._other)]
        self._nesterov = NesterovMomentum(momentum, self._parameters(self._other))
        # Whether the center has received something that the replica has yet to give up, and whether
        # ``_pull`` already says how much.
        self._due = self._known = False

    def exchange(self, run: Run, *, last: bool) -> None:
        """Contribute the replica's values, unless the window has no rows.

        Args:
            run: the worker's.
            last: whether the window is the epoch's last.
        """
        if not run.examples:
            run.averager.exchange(self._other, run.close_window(last=last))
            return
        self._fill_in()
        # All pull equally, whatever their rows.
        run.averager.exchange(self._other, run.close_window(last=last, group_weight=1))
        if not self._from_last:
            self._find_pull(self._segments(), self._other, self._rate_after)

    def move(self) -> None:
        """After the optimizer's step: coast, and give up what the center has received."""
        parameters = self._parameters(self._segments())
        self._nesterov.after_step(parameters)
        if self._due:
            for values, pull in zip(parameters, self._pull, strict=True):
                values.sub_(pull)
            self._due = self._known = False
        self._nesterov.leave(parameters)

    def skip(self, batches: Iterator[Batch]) -> Batch | None:
        """Skip minibatches that have been trained on; returns the last, if there are any."""
        return None

    def swap(self) -> None:
        """Make the replica hold the center instead of its own values, or those again."""
        for segment, other in zip(self._segments(), self._other, strict=True):
            for start in range(0, len(segment), SWAPPED_AT_ONCE):
                part = slice(start, start + SWAPPED_AT_ONCE)
                kept = segment[part].clone()
                segment[part] = other[part]
                other[part] = kept

    def saved(self) -> dict[str, Any]:
        """For ``restore``, while the replica trains."""
        saved = {f"own.{index}": values for index, values in enumerate(self._segments())}
        if self._known:
            saved |= {f"pull.{index}": pull for index, pull in enumerate(self._pull)}
        return {**saved, **self._nesterov.saved(), "due": self._due, "known": self._known}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        for index, other in enumerate(self._other):
            other.copy_(saved[f"own.{index}"])
        self._nesterov.restore(saved, self._parameters(self._other))
        self._due, self._known = saved["due"], saved["known"]
        if self._known:
            for index, pull in enumerate(self._pull):
                pull.copy_(saved[f"pull.{index}"])
        elif self._due:
            # It was saved before the center's answer, which the replica now holds.
            self._find_pull(self._other, self._segments(), self._rate_after)

    @property
    def _rate_after(self) -> float:
        """The moving rate as a part of the distance left once the center has moved."""
        return self._rate / (1 - self._rate)

    def _fill_in(self) -> None:
        """Write what is contributed over the center, to which a pull is then due."""
        assert not self._due
        mine = self._segments()
        self._due = True
        if self._from_last:
            self._find_pull(mine, self._other, self._rate)
        for values, other in zip(mine, self._other, strict=True):
            other.copy_(values)
        self._nesterov.to_places(self._parameters(self._other))

    def _find_pull(self, mine: list[Tensor], center: list[Tensor], rate: float) -> None:
        ends = zip(self._parameters(mine), self._parameters(center), self._pull, strict=True)
        for values, held, pull in ends:
            torch.sub(values, held, out=pull)
        self._nesterov.to_places(self._pull)
        for pull in self._pull:
            pull.mul_(rate)
        self._known = True

    def _segments(self) -> list[Tensor]:
        return self._replica.segments(with_optimizer=False)

    def _parameters(self, segments: list[Tensor]) -> list[Tensor]:
        return [
            values
            for kind, values in zip(self._kinds, segments, strict=True)
            if kind == "parameters"
        ]


class SpringAmongWorkers(Spring):
    """One replica's end of its spring, where the workers move the center that each of them keeps.

    Every worker must make one at the same time.

    Args:
        run: the worker's, with its group.
        rate: the moving rate.
        momentum: of the replica's steps.
        period: steps between two rounds.
    """

    def __init__(self, run: Run, rate: float, momentum: float, period: int) -> None:
        super().__init__(run.replica, rate, momentum, from_last=True)
        self._group = WorkerGroup(run, run.batch_size)
        self._period = period
        centers = self._parameters(self._other)
        # The center in float32, like the driver's, where rounding to half precision in each round
        # would lose small pulls; else the center itself.
        self._exact = [values.float() if values.dtype in HALVES else values for values in centers]
        self._sums = [torch.empty_like(values) for values in self._exact]
        # Waits for the pending sums, and moves the center.
        self._arrive: Callable[[], None] | None = None

    def exchange(self, run: Run, *, last: bool) -> None:
        """Begin a round; with the epoch's ``last`` one, finish all and commit the center."""
        for window in self._group.rounds(run, self._period, None, self._settled, last=last):
            self._begin_round(run, window)

    def saved(self) -> dict[str, Any]:
        """For ``restore``, while the replica trains; the center only if kept in float32 here."""
        return super().saved() | {f"center.{i}": exact for i, exact in self._apart().items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        super().restore(saved)
        for index, exact in self._apart().items():
            exact.copy_(saved[f"center.{index}"])

    def _apart(self) -> dict[int, Tensor]:
        """The centers kept in float32 besides those that the replica can hold."""
        ends = zip(self._exact, self._parameters(self._other), strict=True)
        return {i: exact for i, (exact, center) in enumerate(ends) if exact is not center}

    def _begin_round(self, run: Run, window: range) -> None:
        """Send the replica, if it trained in the window, without waiting for the others'."""
        self._settle()
        group = self._group
        pulls = [min(1, examples) for examples in group.examples_of(window)]
        takes_part = bool(pulls[group.collective.index])
        mine, report = self._segments(), run.window()
        if takes_part:
            if not (math.isfinite(report.loss_sum) and all(map(looks_finite, mine))):
                for values in mine:
                    require_finite(values, report)
            assert not self._due
            self._due = True
            self._find_pull(mine, self._other, self._rate)
        for values, travels in zip(self._parameters(mine), self._sums, strict=True):
            if takes_part:
                travels.copy_(values)
            else:
                travels.zero_()
        if takes_part:
            self._nesterov.to_places(self._sums)
        buffers = [
            (values, center)
            for kind, values, center in zip(self._kinds, mine, self._other, strict=True)
            if kind != "parameters"
        ]
        for values, center in buffers:
            center.copy_(values)
        group.average([center for _, center in buffers], pulls, report)
        arrivals = [group.collective.begin_all_reduce(total) for total in self._sums]
        self._arrive = lambda: self._move_center(arrivals, sum(pulls))

    def _settled(self) -> list[Tensor]:
        """The center, including pending rounds."""
        self._settle()
        return self._other

    def _settle(self) -> None:
        """Finish the pending round."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def _move_center(self, arrivals: list[Callable[[], None]], replicas: int) -> None:
        ends = zip(self._exact, self._parameters(self._other), self._sums, arrivals, strict=True)
        for exact, center, total, arrive in ends:
            arrive()
            exact.copy_(total.mul_(self._rate).add_(exact, alpha=1 - replicas * self._rate))
            if exact is not center:
                center.copy_(exact)


class HogwildSpring(Spring):
    """One replica's end of its spring, whose exchanges are under way while it trains.

    An exchange must be over when the next one begins: its center is then the one read last.

    Args:
        run: the worker's.
        rate: the moving rate.
        momentum: of the replica's steps.
    """

    def __init__(self, run: Run, rate: float, momentum: float) -> None:
        super().__init__(run.replica, rate, momentum, from_last=True)
        self._run = run
        self._under_way = False
        self._ahead = StepsAhead(run)

    def exchange(self, run: Run, *, last: bool) -> None:
        """Send the pull; wait for the reply only in an epoch's ``last`` window."""
        self._settle()
        if last:
            super().exchange(run, last=True)
            return
        self._fill_in()
        # All pull equally, whatever their rows.
        run.averager.begin_exchange(self._other, run.close_window(last=False, group_weight=1))
        self._under_way = True

    def move(self) -> None:
        """Move like any spring, and count the step."""
        super().move()
        self._ahead.steps += self._under_way

    def skip(self, batches: Iterator[Batch]) -> Batch | None:
        """Skip what was trained on after the commit from which this worker resumes."""
        return self._ahead.skip(batches)

    def saved(self) -> dict[str, Any]:
        """For ``restore``, while the replica trains, some steps after the last commit."""
        return super().saved() | self._ahead.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        super().restore(saved)
        self._ahead.restore(saved)

    def _settle(self) -> None:
        """Read the center that the current exchange has left; the state is saved as of now."""
        if self._under_way:
            self._under_way = False
            self._run.averager.end_exchange(self._other, 0.0)
            self._ahead.steps = 0


class NesterovMomentum:
    """One replica's velocity v, at momentum m, where the optimizer moves the parameters by u.

        v  <-  m * v + u(x + m * v)          x  <-  x + v

    The parameters are x + m * v, so that the next gradient is taken there. For SGD without
    momentum, u is minus learning rate times gradient: Sutskever et al. 2013, "On the importance of
    initialization and momentum in deep learning". torch's ``SGD(nesterov=True)`` moves the
    parameters the same way while the learning rate is constant, but keeps neither x nor v.

    Args:
        momentum: m, in [0, 1); 0 for none, which costs nothing.
        parameters: where they start.
    """

    def __init__(self, momentum: float, parameters: Sequence[Tensor]) -> None:
        self._momentum = momentum
        parameters = parameters if momentum else []
        # Where the last step left the parameters; velocities in half precision are kept in float32,
        # as small changes to them would be rounded away.
        self._left_at = [values.clone() for values in parameters]
        self._velocity = [
            torch.zeros_like(values, dtype=torch.float32 if values.dtype in HALVES else None)
            for values in parameters
        ]

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Coast after the optimizer has moved the parameters; ``leave`` must follow."""
        ends = zip(parameters, self._left_at, self._velocity, strict=self._momentum > 0)
        for values, left_at, velocity in ends:
            moved = torch.sub(values, left_at, out=left_at)
            velocity.mul_(self._momentum).add_(moved)
            values.add_(velocity, alpha=self._momentum)

    def leave(self, parameters: Sequence[Tensor]) -> None:
        """Note where the parameters are when the optimizer's next step begins."""
        for values, left_at in zip(parameters, self._left_at, strict=self._momentum > 0):
            left_at.copy_(values)

    def to_places(self, parameters: Sequence[Tensor]) -> None:
        """Turn parameters, or copies of them, into x, where the springs end."""
        for values, velocity in zip(parameters, self._velocity, strict=self._momentum > 0):
            values.add_(velocity, alpha=-self._momentum)

    def saved(self) -> dict[str, Any]:
        """For ``restore``."""
        return {f"velocity.{index}": values for index, values in enumerate(self._velocity)}

    def restore(self, saved: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Take over what was ``saved``.

        Args:
            saved: by a worker with these parameters.
            parameters: where it left them.
        """
        for index, velocity in enumerate(self._velocity):
            velocity.copy_(saved[f"velocity.{index}"])
        self.leave(parameters)
