"""Shares, sums, means, heartbeats and grids of workers that exchange among themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdl.averager.values.replica_codec import looks_finite, require_finite
from sparkdl.collective import Collective
from sparkdl.collective.tree_sum import TreeSum
from sparkdl.errors import ConfigError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.protocols import SpreadValues
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import CheckedFields, argument, instance, number, whole
from sparkdl.strategies.base import Run

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats to the driver, which does not see the collective; a sixth of an
operation's deadline if that is less."""
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ColorTrees(CheckedFields):
    """Has workers add up values along several trees, in the place of gloo's ring.

    For averaging among executors and ``GradientAllReduce``, on CPUs. Trees have fewer messages
    that wait for each other than a ring, each of which takes the processors longer; the sum differs
    by rounding.

    Args:
        colors: number of trees, each with its part of the values, and of a node's children, >= 1.
            For N workers the largest k up to it is taken for which N mod k is 0 or 1, and no worker
            then has children in two trees.
        chunk_kb: KB that travel in one message, > 0; smaller ones keep all levels of a tree busy
            earlier, larger ones take the processors less time.

    Raises:
        ConfigError: an argument is out of range.
    """

    colors: int = argument(4, whole(1, "trees"))
    chunk_kb: float = argument(256, number("of KB > 0", lambda kb: kb > 0))

    def among(self, workers: Collective) -> TreeSum:
        """What adds up tensors; each of the workers has to make it."""
        return workers.in_trees(self.colors, int(self.chunk_kb * 1024))


REDUCTION = instance(ColorTrees | None, "None or a ColorTrees")
"""The rule for an argument ``reduction``."""


def require_no_gpu(reduction: ColorTrees | None, replica: Replica) -> None:
    """Refuse trees of ours on GPUs."""
    if reduction is not None and replica.device.type != "cpu":
        raise ConfigError(
            f"reduction={reduction!r} is for CPUs, but the replica is on {replica.device}: NCCL "
            "has double binary trees of its own, and chooses between them and rings by size. Drop "
            "reduction"
        )


class WorkerGroup:
    """One worker among the others of its run.

    Args:
        run: this worker's, with its group; every worker must make one at the same time.
        rows_a_step: rows of one worker in an optimizer step, except its last of an epoch.
        within_host: whether the others are only those of the same host.
        trees: along which means are formed; None for the collective's own way.

    Attributes:
        collective: the group.
        shares: each member's rows per epoch.
        rows_a_step: as given.
        steps: optimizer steps of the epoch that all have taken; not 0 at first for workers that
            resume in the middle of one.
    """

    def __init__(
        self,
        run: Run,
        rows_a_step: int,
        *,
        within_host: bool = False,
        trees: ColorTrees | None = None,
    ) -> None:
        assert run.collective is not None
        everyone = run.collective
        self.collective: Collective = everyone.within_host() if within_host else everyone
        self._trees = None if trees is None else trees.among(self.collective)
        if self._trees is not None:
            run.cleanup.callback(self._trees.close)
        self.rows_a_step = rows_a_step
        run.agree = self.agree
        self.agree(run)
        self._calls = 0
        self._next_heartbeat = 1
        self._last_heartbeat = time.monotonic()
        self._commit_wanted = False

    def agree(self, run: Run) -> None:
        """Tell each other how many rows each has; every worker must do so at the same time.

        Args:
            run: this worker's, at the start of an epoch or where it resumes in one.
        """
        gathered = run.averager.gather({"rows": run.rows, "steps": run.step_of_epoch})
        told = [gathered[rank] for rank in self.collective.members]
        self.shares = [int(one["rows"]) for one in told]
        # Workers with no rows left may have stopped counting.
        self.steps = self._steps_committed = max(int(one["steps"]) for one in told)

    def examples_of(self, steps: range) -> list[int]:
        """How many rows each member has in some ``steps``, counted from an epoch's start."""
        start, stop = steps.start * self.rows_a_step, steps.stop * self.rows_a_step
        return [max(0, min(share, stop) - start) for share in self.shares]

    def weights_of(self, run: Run, steps: range) -> Sequence[float]:
        """How much each member's values count after some ``steps``: by rows, if the loss does.

        Args:
            run: this worker's; every member must ask at the same time.
            steps: those since it last asked, counted from the epoch's start.
        """
        if not run.replica.may_divide:
            return self.examples_of(steps)
        weights = torch.zeros(len(self.shares), dtype=torch.float64, device=run.replica.device)
        weights[self.collective.index] = run.take_weight()
        self.collective.all_reduce(weights)
        return [float(each) for each in weights]

    def average(
        self, segments: Sequence[Tensor], weights: Sequence[float], window: WindowReport
    ) -> None:
        """Overwrite every member's values with the weighted mean.

        Integers and booleans become those of the first member that has a weight. Weights are
        relative to its weight, as in the averager, so equal windows are pure additions.

        Args:
            segments: flat tensors, the same number and kinds on every member.
            weights: how much each member's values count; not all zero.
            window: this worker's, which ends here or goes on.

        Raises:
            NonFiniteError: this worker's values are not finite, judging by a sample and the
                window's loss; nobody gets them.
        """
        first = next(index for index, count in enumerate(weights) if count)
        total = sum(count / weights[first] for count in weights)
        weight = weights[self.collective.index] / weights[first]
        # A full check takes a tenth of the round's time.
        if weight and not (math.isfinite(window.loss_sum) and all(map(looks_finite, segments))):
            for values in segments:
                require_finite(values, window)
        for values in segments:
            if not values.is_floating_point():
                self.collective.broadcast(values, self.collective.members[first])
                continue
            # Half precision is summed in float32, as in the averager.
            wide = values.float() if values.dtype in HALVES else values
            if weight == 0.0:
                wide.zero_()  # multiplying by 0 would keep NaN
            elif weight != 1.0:
                wide.mul_(weight)
            self.collective.all_reduce(wide, self._trees)
            if total != 1.0:
                wide.div_(total)
            if wide is not values:
                values.copy_(wide)

    def heartbeat(self, run: Run) -> None:
        """Report every rank to the driver now and then; all must call it equally often."""
        self._calls += 1
        if self._calls < self._next_heartbeat:
            return
        seconds = time.monotonic() - self._last_heartbeat
        # The clocks differ; rank 0's decides for all how many calls to wait for the next one.
        told = run.averager.gather({"seconds": seconds, "calls": self._calls})
        pace = told[0]["seconds"] / told[0]["calls"]
        interval_s = min(HEARTBEAT_S, self.collective.deadline_s / 6)
        self._next_heartbeat = max(1, round(interval_s / max(pace, 1e-6)))
        self._calls = 0
        self._last_heartbeat = time.monotonic()
        self._commit_wanted = run.averager.commit_wanted

    @property
    def steps_an_epoch(self) -> int:
        """Optimizer steps of the worker with the most rows."""
        return math.ceil(max(self.shares) / self.rows_a_step)

    @property
    def done(self) -> bool:
        """Whether the epoch's last step has been taken."""
        return self.steps >= self.steps_an_epoch

    def rounds(
        self,
        run: Run,
        period: int,
        every: int | None,
        segments: Callable[[], Sequence[Tensor]],
        *,
        last: bool,
    ) -> Iterator[range]:
        """The steps of the next window, after which the caller exchanges; commits what is due.

        Args:
            run: this worker's.
            period: steps in a window.
            every: as for ``commit_if_due``.
            segments: likewise.
            last: whether this worker has taken its last step of the epoch: it takes part in all
                windows that are left, and the epoch ends with a commit.
        """
        while not (last and self.done):
            window = range(self.steps, self.steps + period)
            yield window
            self.steps = window.stop
            self.heartbeat(run)
            self.commit_if_due(run, every, segments)
            if not last:
                return
        self.commit(run, segments(), last=True)

    def commit_if_due(
        self,
        run: Run,
        every: int | None,
        segments: Callable[[], Sequence[Tensor | SpreadValues]],
    ) -> None:
        """Send the driver a copy to resume from, every ``every`` steps.

        And when it asked for one with the last heartbeat. The epoch's end has one in any case,
        which is not sent here.
        """
        due = every is not None and self.steps - self._steps_committed >= every
        if (due or self._commit_wanted) and not self.done:
            self.commit(run, segments(), last=False)

    def commit(self, run: Run, segments: Sequence[Tensor | SpreadValues], *, last: bool) -> None:
        """Send the driver a copy: for equal replicas, one contribution stands for all.

        Args:
            run: this worker's.
            segments: the replica's state, equal on all workers.
            last: whether the epoch ends here.

        Raises:
            TrainingError: this worker did not train on the rows that it announced, by which its
                contributions were weighted.
        """
        announced = self.examples_of(range(self._steps_committed, self.steps))
        self.require_announced(run, announced)
        self._commit_wanted = False
        self.steps = self._steps_committed = 0 if last else self.steps
        group_weight = sum(announced) if run.rank == 0 else 0
        run.averager.commit(segments, run.close_window(last=last, group_weight=group_weight))

    @property
    def has_committed(self) -> bool:
        """Whether no step has been taken since the last commit."""
        return self.steps == self._steps_committed

    def require_announced(self, run: Run, announced: Sequence[int]) -> None:
        """Check that this worker trained on the rows by which the others weight its values.

        Args:
            run: this worker's.
            announced: rows of each member since it last contributed.

        Raises:
            TrainingError: it has not.
        """
        if run.examples != announced[self.collective.index]:
            raise TrainingError(
                f"rank {run.rank} trained on {run.examples} rows in epoch {run.epoch}, but had "
                f"announced {announced[self.collective.index]} to the others, which weight its "
                "values by that number. Return as many rows from batchTransform as it is given, or "
                "use a strategy that averages in the driver, such as ParameterAveraging()"
            )

    def exchange(self, run: Run, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in a round with the driver, where the first member stands for all.

        Args:
            run: this worker's.
            segments: the replica's state, equal on all members; overwritten with the new center.
            window: this worker's, which stands for all members on the first and for none on others.
        """
        first = self.collective.members[0]
        if run.rank == first:
            run.averager.exchange(segments, window)
        else:
            run.averager.commit(segments, window)
        for values in segments:
            self.collective.broadcast(values, first)


@dataclass(frozen=True)
class Grid:
    """The workers, each a rank, in rows that divide work and columns over which they add up.

    Attributes:
        world_size: how many there are.
        width: how many are in a row, a divisor of ``world_size``.
    """

    world_size: int
    width: int

    @classmethod
    def of(cls, world_size: int, fraction: float) -> Grid:
        """The grid whose rows have about this fraction of all workers.

        Args:
            world_size: workers.
            fraction: in (0, 1]; the width is the divisor of the number of workers that comes
                closest, the larger of two.
        """
        widths = [width for width in range(world_size, 0, -1) if world_size % width == 0]
        return cls(world_size, min(widths, key=lambda width: abs(width - fraction * world_size)))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The ranks of each row."""
        starts = range(0, self.world_size, self.width)
        return [tuple(range(start, start + self.width)) for start in starts]

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """The ranks of each column."""
        starts = range(self.width)
        return [tuple(range(start, self.world_size, self.width)) for start in starts]
