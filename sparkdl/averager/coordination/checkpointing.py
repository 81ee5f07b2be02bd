"""Which commits become checkpoints, and whose worker states belong to them.

One at a time is put together: the worker states arrive, then it is written while training goes on.
A round after which the next is due waits until it has been written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.membership import Membership
from sparkdl.errors import DeadlineError, SparkDLError


class Schedule(Protocol):
    """Which commits become checkpoints."""

    def due(self, epoch: int) -> bool:
        """Whether the end of an epoch becomes a checkpoint."""

    def due_within(self, rounds: int) -> bool:
        """Whether it is time for one, this many rounds after the last."""


class Checkpointing:
    """The checkpoint being put together, and when the next is due.

    Args:
        schedule: which commits become checkpoints; None for none.
        committed: how far the training has come.
        saved: whether a checkpoint holds what was committed before, if anything was.

    Attributes:
        awaited: ranks whose worker states have yet to arrive.
        told_to_end: why the run has to end once a commit has become a checkpoint.
    """

    def __init__(
        self, schedule: Schedule | None, committed: CommittedProgress, *, saved: bool = True
    ) -> None:
        self.awaited: set[int] = set()
        self.told_to_end: SparkDLError | None = None
        self._schedule = schedule
        self._committed = committed
        self._since: float | None = None
        self._asked = False
        # The last round that a checkpoint was begun of, and the last that one exists of.
        self._begun_round = 0
        self._saved_round: int | None = 0 if saved else None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being put together."""
        return self._since is not None

    @property
    def has_last_commit(self) -> bool:
        """Whether a checkpoint of the last commit exists, or none are written at all."""
        return self._schedule is None or self._saved_round == self._committed.round

    def preempt(self, reason: SparkDLError) -> None:
        """Make the next commit a checkpoint, after which the run ends."""
        self._asked = True
        self.told_to_end = reason

    def end_epoch(self, epoch: int) -> None:
        """Take note that a commit is the end of an epoch."""
        if self._schedule is not None and self._schedule.due(epoch):
            self._asked = True

    def holds(self, window: on.WindowClosed) -> bool:
        """Whether a window's round may become a checkpoint while another is being written."""
        if self._schedule is None or self._since is None:
            return False
        rounds = self._committed.round + 1 - self._begun_round
        ends = self.told_to_end is not None
        return ends or window.report.last or self._schedule.due_within(rounds)

    def begin_if_due(self, windows: Iterable[on.WindowClosed], now: float) -> bool:
        """Begin a checkpoint of the latest commit, if it is time.

        Args:
            windows: the last windows of the workers whose state is that of the commit. These are
                asked for it; workers that come back later are not.
            now: the time, in seconds.
        """
        if self._schedule is None or self._since is not None:
            return False
        rounds = self._committed.round - self._begun_round
        if not self._asked and not self._schedule.due_within(rounds):
            return False
        self._asked = False
        self._begun_round = self._committed.round
        self._since = now
        self.awaited = {window.member.rank for window in windows}
        return True

    def forgo(self, rank: int) -> bool:
        """Take note that a rank's state has come, or never will; returns whether none is left."""
        if rank not in self.awaited:
            return False
        self.awaited.discard(rank)
        return not self.awaited

    def finish(self, *, saved: bool) -> SparkDLError | None:
        """Take note that writing has ended; returns why the run has to end now, if it does.

        Args:
            saved: whether the checkpoint exists. When the next is due does not depend on it.
        """
        self._since = None
        if saved:
            self._saved_round = self._begun_round
        return None if self._asked else self.told_to_end

    def restart_clock(self, now: float) -> None:
        """Restart the clock of how long the checkpoint takes."""
        self._since = None if self._since is None else now

    def require_in_time(self, members: Membership, now: float) -> None:
        """Check that the checkpoint is not taking longer than the deadline.

        Raises:
            DeadlineError: it has taken longer.
        """
        if self._since is None or now - self._since <= members.deadline_s:
            return
        why = "Is the storage of checkpointPath slow or gone?"
        if self.awaited:
            why = f"It is still waiting for the worker state of {members.name(self.awaited)}"
        raise DeadlineError(
            f"the checkpoint of epoch {self._committed.epoch} was not written within "
            f"{members.deadline_s:g} s. {why}"
        )
