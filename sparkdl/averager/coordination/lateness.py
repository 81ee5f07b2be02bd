"""Who is waited for, who of those is overdue, and what for.

Only the check of the clock asks, once a second or so, so the cost may grow with the workers.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkdl.averager.coordination.checkpointing import Checkpointing
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.gathers import Gathers
from sparkdl.averager.coordination.membership import Membership
from sparkdl.averager.coordination.round import Round
from sparkdl.averager.coordination.shards import Shards
from sparkdl.errors import DeadlineError


class Lateness:
    """What the state of a run says about silent workers; changes nothing.

    Args:
        members: who is in the run.
        shards: what the workers found in their rows.
        gathers: what they exchange in gathers.
        round: who takes part in the round under way.
        committed: how far the training has come.
        checkpoints: the checkpoint being put together.
        wanting: the ranks that wait for the last epoch's loss.
    """

    def __init__(
        self,
        members: Membership,
        shards: Shards,
        gathers: Gathers,
        round: Round,
        committed: CommittedProgress,
        checkpoints: Checkpointing,
        wanting: Mapping[int, object],
    ) -> None:
        self._members = members
        self._shards = shards
        self._gathers = gathers
        self._round = round
        self._committed = committed
        self._checkpoints = checkpoints
        self._wanting = wanting

    def overdue(self, now: float, *, started: bool, done: set[int]) -> set[int]:
        """Those that are waited for, and have been silent for longer than they are granted.

        Args:
            now: the time, in seconds.
            started: whether the workers have been allowed to start.
            done: ranks that have finished; nobody waits for them.
        """
        everyone, overdue = self._members.everyone, self._members.overdue
        if not started:
            return overdue((rank for rank in everyone if rank not in self._shards), now)
        present = self._gathers.present
        if present is not None:
            return overdue(everyone - present, now)
        if self._wanting:
            return overdue(everyone - self._committed.validated_by, now)
        return self._overdue_in_round(now, done) - done

    def drops(self, now: float, *, started: bool, done: set[int]) -> dict[int, float]:
        """Whom to drop for silence, and how many seconds each was granted; by rank.

        Args:
            now: the time, in seconds.
            started: whether the workers have been allowed to start.
            done: ranks that have finished; nobody waits for them.

        Raises:
            DeadlineError: the run cannot go on without the silent workers.
        """
        members, deadline_s = self._members, self._members.deadline_s
        silent = self.overdue(now, started=started, done=done)
        present = sorted(silent & members.there)
        if not silent:
            return {}
        if not (present and members.tolerance.max_failures and started):
            late = (silent - members.ever_joined) or silent
            raise DeadlineError(
                f"{members.name(late)} {self.what_is_missing(late, started=started)} within "
                f"{deadline_s:g} s. If it takes longer here, raise the estimator's 'timeout'"
            )
        if self.hold_up(silent):
            return {rank: members.patience_s(rank) for rank in present}
        # All may be busy, or have trained their last epoch: dropping them would help nobody.
        overdue = (rank for rank in present if members.silent_s(rank, now) >= deadline_s)
        return dict.fromkeys(overdue, deadline_s)

    def hold_up(self, silent: set[int]) -> bool:
        """Whether anyone who is not silent has to wait for those who are."""
        this = self._round
        waiting = this.entered.keys() | this.held.keys() | this.through.keys()
        waiting |= this.at_barrier.keys() | self._wanting.keys() | (self._gathers.present or set())
        return bool(waiting - silent)

    def what_is_missing(self, ranks: set[int], *, started: bool) -> str:
        """What the ranks have failed to do; follows their names."""
        members, joined = self._members, self._members.ever_joined
        if not ranks <= joined:
            return (
                f"did not start ({len(joined)} of {members.world_size} workers did, and they need "
                "a gang-scheduled start: are other jobs using the cluster? An executor that "
                "cannot reach the driver says so in its log)"
            )
        if not ranks & members.there:
            reasons = "; ".join(members.last_loss(rank) for rank in sorted(ranks))
            return f"did not come back ({reasons}; is there a free slot to restart it?)"
        if not started:
            return "did not receive more of its rows"
        if self._gathers.present is not None:
            return "did not take part in an exchange among the workers"
        epoch, rounds = self._committed.epoch, self._committed.round
        if self._wanting:
            return f"did not report the loss on its held-out rows after epoch {epoch - 1}"
        if self._round.readers:
            return f"did not take the center of round {rounds}"
        if self._checkpoints.awaited:
            return f"did not send its worker state for the checkpoint before epoch {epoch}"
        return f"did not contribute to round {rounds + 1} (epoch {epoch})"

    def _overdue_in_round(self, now: float, done: set[int]) -> set[int]:
        this, overdue = self._round, self._members.overdue
        if this.readers:
            return overdue(this.readers, now)
        if self._checkpoints.awaited:
            return overdue(self._checkpoints.awaited, now)
        awaited = this.group if this.is_open else this.active
        late = awaited - this.entered.keys() - this.held.keys() - this.at_barrier.keys() - done
        adding = this.entered.keys() - this.complete
        # Those adding wait for their turns: only the first can always go on, unless it is late
        # itself or held until a checkpoint is written.
        first = min(late | adding | (this.held.keys() & awaited), default=None)
        absent: set[int] = set()
        if len(this.admitted) < self._members.tolerance.min_workers:
            absent = set(self._members.everyone - this.admitted)
        elif first is None:
            # Everyone present waits for those who are absent.
            absent = this.pending - this.admitted
        silent = overdue(late | absent, now)
        if first in adding and self._members.overdue_in_its_turn(first, now):
            silent.add(first)
        return silent
