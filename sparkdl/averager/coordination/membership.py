"""Who is in a run: joined, alive, silent, lost, back. Times come from outside.

Heartbeats are the only evidence: whatever arrives from a worker, or is read by it, is one. A rank
is overdue when it is waited for and its last message is longer ago than it is granted. The cost of
an event does not depend on the number of workers; only the check of the clock goes through all of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import StoppedError, TrainingError, WorkerLostError

if TYPE_CHECKING:
    from sparkdl.averager.coordination.run_state import RunSpec

STRAGGLER_S = 15.0
"""Seconds of silence that any worker is granted before it is dropped from a round."""
STRAGGLER_WINDOWS = 5.0
"""It is also granted this many times the longest window of the run so far."""
GAP_TICKS = 4.0
"""A check of the clock more than this many intervals after the last means the driver paused."""


@dataclass(frozen=True)
class Tolerance:
    """What a run survives.

    Attributes:
        max_failures: how many losses of workers are allowed in total; 0 to end the run at the first
            loss. Workers lost together with their task count as one loss.
        min_workers: the fewest workers with which rounds go on.
    """

    max_failures: int = 0
    min_workers: int = 1


def too_many_losses(losses: Sequence[str], allowed: int) -> WorkerLostError:
    """The error for one loss more than ``maxFailures`` allows; mentions the last few."""
    return WorkerLostError(
        f"{len(losses)} workers were lost, more than maxFailures allows ({allowed}): "
        + "; ".join(losses[-5:])
    )


@dataclass(eq=False, slots=True)
class Member:
    """One worker's connection, from joining to leaving.

    Attributes:
        rank: the worker's rank.
        host: the host that it runs on.
        attempt: its Spark task's attempt; a later one replaces an earlier one.
        task: its task's number, which several workers may share.
        frozen: the fingerprint of its frozen parameters; empty if it has none.
        gone: whether it was lost, dropped or replaced; what it says from then on is ignored.
    """

    rank: int
    host: str
    attempt: int = 0
    task: int = -1
    frozen: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        if self.task < 0:
            self.task = self.rank

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class FencedError(StoppedError):
    """The worker's place has been taken by a later attempt of its task."""


class Membership:
    """The workers of a run.

    Args:
        spec: how the run was planned.
        now: the time, in seconds.

    Attributes:
        losses: which workers were lost, and why.
        dropped: the ranks of workers dropped for their silence, in the order of the drops.
        now: the time of the last event, in seconds.
        tick_s: seconds between two checks of the clock.
    """

    def __init__(self, spec: RunSpec, now: float) -> None:
        self._spec = spec
        self.everyone = frozenset(range(spec.world_size))
        self.tick_s = min(1.0, spec.deadline_s / 4)
        self.now = now
        self.losses: list[str] = []
        self.dropped: list[int] = []
        self._members: dict[int, Member] = {}
        self._lost: Counter[tuple[int, int, int]] = Counter()
        self._last_message: dict[int, float] = {}
        # Nobody was expected to send anything before this time.
        self._silence_began = now
        self._awaited_began = now
        self._longest_window = 0.0
        # When each rank that is still training its window began it.
        self._window_began: dict[int, float] = {}
        self._patience = 1.0

    def join(self, member: Member) -> Member | None:
        """Let a worker in.

        Returns:
            The one whose place it takes, unless that one was known to be lost.

        Raises:
            TrainingError: the rank is not one of this run's, or has joined already.
            FencedError: a later attempt has joined already.
        """
        rank, host, world_size = member.rank, member.host, self._spec.world_size
        if not 0 <= rank < world_size:
            raise TrainingError(
                f"a task with rank {rank} on {host} joined a run of {world_size} workers: "
                "Spark started more tasks than the run has workers"
            )
        before = self._members.get(rank)
        if (
            before is not None
            and member.attempt <= before.attempt
            and not self._spec.tolerance.max_failures
        ):
            raise TrainingError(
                f"rank {rank} joined from {host}, but it had already joined from {before.host}: "
                "Spark started the task twice"
            )
        if before is not None and member.attempt < before.attempt:
            raise FencedError(
                f"attempt {member.attempt} of rank {rank} on {host} is out of date: attempt "
                f"{before.attempt} runs on {before.host}"
            )
        self._members[rank] = member
        self.note_heartbeat(rank)
        return None if before is None or before.gone else before

    def lose(self, member: Member, why: str) -> WorkerLostError | None:
        """Take note that a worker is lost; returns the error if that is one too many."""
        member.gone = True
        self._window_began.pop(member.rank, None)
        self.note_heartbeat(member.rank)
        self.losses.append(f"{member} {why}")
        self._lost[member.task, member.attempt, member.rank] += 1
        # Workers of one task that are lost once each count as one.
        failures = Counter[tuple[int, int]]()
        for (task, attempt, _), times in self._lost.items():
            failures[task, attempt] = max(times, failures[task, attempt])
        allowed = self._spec.tolerance.max_failures
        if sum(failures.values()) <= allowed:
            return None
        if allowed:
            return too_many_losses(self.losses, allowed)
        return WorkerLostError(self.losses[-1], ranks=(member.rank,))

    def of(self, rank: int) -> Member:
        """The worker that joined last for a rank."""
        return self._members[rank]

    @property
    def joined(self) -> set[int]:
        """Ranks that have joined at least once."""
        return set(self._members)

    @property
    def there(self) -> set[int]:
        """Ranks that have joined and are not lost."""
        return {rank for rank, member in self._members.items() if not member.gone}

    def note_heartbeat(self, rank: int, at: float | None = None) -> None:
        """Take note that a worker is alive, now or since the last event."""
        self._last_message[rank] = self.now if at is None else at

    def restart_clock(self) -> None:
        """Restart everybody's silence clock: something that all waited for has happened."""
        self._silence_began = self.now

    def pass_turn(self) -> None:
        """Restart the silence clock of whoever waited for another's turn to end."""
        self._awaited_began = self.now

    def begin_window(self, rank: int) -> None:
        """Take note that a rank has what it needs to train."""
        self._window_began[rank] = self.now

    def end_window(self, rank: int) -> None:
        """Take note that a rank has finished a window; one that is merely resent does not count."""
        began = self._window_began.pop(rank, None)
        if began is not None:
            lasted = self.now - max(began, self._silence_began)
            self._longest_window = max(self._longest_window, lasted)

    def patience_s(self, rank: int) -> float:
        """Seconds for which a rank may be silent while it is waited for."""
        is_there = rank in self._members and not self._members[rank].gone
        if not (is_there and self._spec.tolerance.max_failures and self._longest_window):
            return self._spec.deadline_s
        granted = max(STRAGGLER_S, STRAGGLER_WINDOWS * self._longest_window)
        return min(granted * self._patience, self._spec.deadline_s)

    def double_patience(self) -> None:
        """Grant more after dropping a worker that may merely have been busy for long."""
        self._patience *= 2

    def look(self, now: float) -> bool:
        """Check the clock; returns whether this process has paused since the last check.

        After a pause (garbage collection, swapping, a suspended laptop), what was sent meanwhile is
        still unread: nobody counts as overdue, or as having trained for long, until silence is
        counted afresh.
        """
        gap, self.now = now - self.now, now
        paused = gap > GAP_TICKS * self.tick_s
        if paused:
            self.restart_clock()
        return paused

    def overdue(self, waited_for: Iterable[int]) -> set[int]:
        """Those whose last message is longer ago than they are granted."""
        return {rank for rank in waited_for if self.silent_s(rank) >= self.patience_s(rank)}

    def overdue_in_its_turn(self, rank: int) -> bool:
        """Whether a rank has been silent for longer than it is granted since its turn began."""
        silent_s = min(self.silent_s(rank), self.now - self._awaited_began)
        return silent_s >= self.patience_s(rank)

    def silent_s(self, rank: int) -> float:
        """Seconds since a rank's last message, or since one has been expected."""
        since = max(self._last_message.get(rank, self._silence_began), self._silence_began)
        return self.now - since

    def name(self, ranks: Iterable[int]) -> str:
        """Ranks with their hosts, for messages."""
        return ", ".join(
            str(self._members[rank]) if rank in self._members else f"rank {rank}"
            for rank in sorted(ranks)
        )

    def last_loss(self, rank: int) -> str:
        """Why a rank was last lost, for messages; empty if it never was."""
        told = [loss for loss in self.losses if loss.startswith(f"rank {rank} ")]
        return told[-1] if told else ""
