"""Who takes part in a run: joined, lost, come back, silent. No locks; ``Rounds`` holds one."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparkdl.errors import StoppedError, TrainingError, WorkerLostError

logger = logging.getLogger(__name__)

STRAGGLER_S = 15.0
"""Seconds of silence that a worker is granted in any case, before it is dropped from a round."""
STRAGGLER_WINDOWS = 5.0
"""Longest windows of the run so far that it is granted."""
LOOK_S = 1.0
"""Seconds between two looks at the clock, and at who is overdue by it."""
MISSED_LOOKS = 3
"""After that long without one, in such intervals, this process itself has stood still."""


@dataclass(frozen=True)
class Tolerance:
    """What a run survives.

    Attributes:
        max_failures: how often workers may be lost in all; 0 to end the run at the first loss.
            Workers that are lost with their task are one loss.
        min_workers: with how many workers rounds go on.
    """

    max_failures: int = 0
    min_workers: int = 1


@dataclass(eq=False)
class Member:
    """One worker's connection, from joining to leaving.

    Attributes:
        rank: the worker's rank.
        host: where it runs.
        attempt: of Spark's task; a later one takes the place of an earlier.
        interrupt: ends the connection.
        task: the number of its task, which several workers may share.
        gone: whether it was lost, dropped or replaced.
    """

    rank: int
    host: str
    attempt: int
    interrupt: Callable[[], None]
    task: int
    gone: bool = False


def too_many_losses(losses: Sequence[str], allowed: int) -> WorkerLostError:
    """The error for one loss more than ``maxFailures`` allows; tells of the last few."""
    return WorkerLostError(
        f"{len(losses)} workers were lost, more than maxFailures allows ({allowed}): "
        + "; ".join(losses[-5:])
    )


class FencedError(StoppedError):
    """The worker's place has been taken by a later attempt of its task."""


class Members:
    """The workers of a run.

    Args:
        world_size: how many there are to be.
        deadline_s: the longest that one may be silent or away while it is waited for, in seconds.
        tolerance: what the run survives.

    Attributes:
        look_s: ``look`` has to be called so often, in seconds between two calls.
        paused_s: how long this process has stood still so far, in seconds.
    """

    def __init__(self, world_size: int, deadline_s: float, tolerance: Tolerance) -> None:
        self.everyone = frozenset(range(world_size))
        self.look_s = min(LOOK_S, deadline_s / 4)
        self.paused_s = 0.0
        self._looked = time.monotonic()
        self.tolerance = tolerance
        self.losses: list[str] = []
        self._lost: Counter[tuple[int, int, int]] = Counter()
        self.dropped: list[int] = []
        self._deadline_s = deadline_s
        self._members: dict[int, Member] = {}
        self._heard: dict[int, float] = {}
        self._longest_window = 0.0
        self._patience = 1.0
        # Who trains on rows that still arrive, and may have to wait for them.
        self._reading: set[int] = set()
        self.hear(self.everyone)

    def join(self, member: Member) -> Member | None:
        """Let a worker in.

        Returns:
            The one whose place it takes, if that one was not known to be lost.

        Raises:
            TrainingError: the rank is not one of this run's, or has joined already.
            FencedError: a later attempt has joined already.
        """
        rank, host = member.rank, member.host
        if rank not in self.everyone:
            raise TrainingError(
                f"a task with rank {rank} on {host} joined a run of {len(self.everyone)} workers: "
                "Spark started more tasks than the run has workers"
            )
        before = self._members.get(rank)
        if before is not None and not self.tolerance.max_failures:
            raise TrainingError(
                f"rank {rank} joined from {host}, but it has joined from {before.host} "
                "before: Spark started the task a second time"
            )
        if before is not None and member.attempt < before.attempt:
            raise FencedError(
                f"attempt {member.attempt} of rank {rank} on {host} is out of date: attempt "
                f"{before.attempt} runs on {before.host}"
            )
        self._members[rank] = member
        self.hear([rank])
        return None if before is None or before.gone else before

    def lose(self, member: Member, why: str) -> WorkerLostError | None:
        """Note that a worker is lost; returns the error if that is one too many."""
        member.gone = True
        member.interrupt()
        self.hear([member.rank])
        self.losses.append(f"rank {member.rank} on {member.host} {why}")
        self._lost[member.task, member.attempt, member.rank] += 1
        if self._failures() <= self.tolerance.max_failures:
            return None
        if not self.tolerance.max_failures:
            return WorkerLostError(self.losses[-1])
        return too_many_losses(self.losses, self.tolerance.max_failures)

    def _failures(self) -> int:
        """Losses, where workers of one task that are lost once each are one."""
        tasks: dict[tuple[int, int], int] = {}
        for (task, attempt, _), times in self._lost.items():
            tasks[task, attempt] = max(times, tasks.get((task, attempt), 0))
        return sum(tasks.values())

    def require(self, member: Member) -> None:
        """Check that a worker is still the one of its rank.

        Raises:
            FencedError: it was lost, dropped or replaced.
        """
        if member.gone:
            raise FencedError(f"rank {member.rank} on {member.host} has lost its place")

    def of(self, rank: int) -> Member:
        """The worker that joined last for a rank."""
        return self._members[rank]

    @property
    def joined(self) -> set[int]:
        """Ranks that have joined at least once."""
        return set(self._members)

    @property
    def there(self) -> set[int]:
        """Ranks that have joined and were not lost."""
        return {rank for rank, member in self._members.items() if not member.gone}

    def hear(self, ranks: Iterable[int]) -> None:
        """Take note that workers are alive, or that nothing has to be expected of them yet."""
        self._heard |= dict.fromkeys(ranks, time.monotonic())

    def look(self) -> None:
        """Take note that somebody looks at the clock.

        If nobody could for long, this process was stopped, swapped out or busy with its memory.
        What the workers sent meanwhile has yet to be read: nobody is overdue until it was silent
        anew.
        """
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if passed > MISSED_LOOKS * self.look_s:
            logger.info("nothing ran in the driver for %.1f s: it waits anew for everyone", passed)
            self.paused_s += passed
            self.hear(self.everyone)

    def measure_window(self, rank: int) -> None:
        """Take note that a rank has finished a window, since it was last heard of."""
        self.look()
        if rank in self._reading:
            return
        self._longest_window = max(self._longest_window, time.monotonic() - self._heard[rank])

    def note_reading(self, rank: int, *, reading: bool) -> None:
        """Take note whether a rank's windows take as long as its rows take to arrive."""
        (self._reading.add if reading else self._reading.discard)(rank)

    def reads(self, rank: int) -> bool:
        """Whether a rank trains on rows that still arrive."""
        return rank in self._reading

    def patience_s(self, rank: int) -> float:
        """Seconds for which a rank may be silent while it is waited for."""
        can_be_dropped = self.tolerance.max_failures and rank in self.there
        if not can_be_dropped or not self._longest_window or rank in self._reading:
            return self._deadline_s
        granted = max(STRAGGLER_S, STRAGGLER_WINDOWS * self._longest_window)
        return min(granted * self._patience, self._deadline_s)

    def double_patience(self) -> None:
        """Grant more, after a worker was dropped that may only have been busy for long."""
        self._patience *= 2

    def overdue(self, waited_for: Iterable[int]) -> set[int]:
        """Those of whom nothing was heard for longer than they are granted."""
        now = time.monotonic()
        return {rank for rank in waited_for if now - self._heard[rank] >= self.patience_s(rank)}

    def next_due(self, waited_for: Iterable[int]) -> float:
        """When the first of them will be overdue, on the monotonic clock."""
        return min(
            (self._heard[rank] + self.patience_s(rank) for rank in waited_for),
            default=time.monotonic() + self._deadline_s,
        )

    def name(self, ranks: Iterable[int]) -> str:
        """Ranks with their hosts, for messages."""
        hosts = {rank: f" on {member.host}" for rank, member in self._members.items()}
        return ", ".join(f"rank {rank}{hosts.get(rank, '')}" for rank in sorted(ranks))

    def last_loss(self, rank: int) -> str:
        """Why a rank was lost last, for messages; empty if it never was."""
        told = [loss for loss in self.losses if loss.startswith(f"rank {rank} ")]
        return told[-1] if told else ""
