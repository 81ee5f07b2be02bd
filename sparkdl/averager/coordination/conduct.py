"""What a worker may do, and when; anything else ends the run, with an error that says why.

Only bugs in a strategy, or a worker that runs other code, get this far.
"""

from __future__ import annotations

from collections.abc import Set

from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.events import Member, WindowClosed
from sparkdl.averager.coordination.gathers import Gathers
from sparkdl.averager.coordination.membership import Membership
from sparkdl.averager.coordination.round import Round
from sparkdl.errors import ModelError, TrainingError

ONE_LAST_WINDOW = (
    "A strategy must exchange exactly one window with last=True in each epoch, on every rank"
)


class Conduct:
    """Checks what workers say against the state of a run, without changing it.

    Args:
        members: who is in the run.
        round: who takes part in the round under way.
        committed: how far the training has come.
        gathers: what the workers exchange in gathers.
        done: ranks that have left for good.
        frozen: the fingerprint that every worker's frozen parameters must have.
    """

    def __init__(
        self,
        members: Membership,
        round: Round,
        committed: CommittedProgress,
        gathers: Gathers,
        done: Set[int],
        frozen: str,
    ) -> None:
        self._members = members
        self._round = round
        self._committed = committed
        self._gathers = gathers
        self._done = done
        self._frozen = frozen

    def require_same_frozen(self, member: Member) -> None:
        """Check that a worker has built the same never-sent parameters as all others.

        Raises:
            ModelError: it built others.
        """
        if member.frozen != self._frozen:
            raise ModelError(
                f"{member} built the model with different frozen parameters (no gradient) from "
                "the driver's, or with different values in them. They are never sent, so all must "
                "build the same: does the function given as model read a file that differs on "
                "that host, or draw random numbers that torch's seed does not control? A module "
                "given as model is sent to all as it is"
            )

    def require_admitted(self, member: Member) -> None:
        """Check that a worker has been allowed to start.

        Raises:
            TrainingError: it has not been.
        """
        if member.rank not in self._round.admitted:
            raise TrainingError(f"{member} behaves as if it had been told to start, but it has not")

    def require_everyone(self, member: Member, what: str) -> None:
        """Check that nobody whom a worker would wait for has left for good.

        Args:
            member: the worker.
            what: what it does; follows its name.

        Raises:
            TrainingError: somebody has left.
        """
        if self._done:
            raise TrainingError(
                f"{member} {what}, but {self._members.name(self._done)} had already left the run: "
                "all workers must train the same number of epochs"
            )

    def require_window_order(self, window: WindowClosed) -> None:
        """Check that a worker may contribute a window now.

        Raises:
            TrainingError: it may not.
        """
        member, report, this = window.member, window.report, self._round
        rank = member.rank
        self.require_admitted(member)
        if rank in this.held:
            raise TrainingError(f"{member} closed a window twice")
        self.require_everyone(member, f"contributed a window of epoch {report.epoch}")
        if report.epoch != self._committed.epoch:
            raise TrainingError(
                f"{member} contributed a window of epoch {report.epoch}, but the run is in epoch "
                f"{self._committed.epoch}. {ONE_LAST_WINDOW}"
            )
        if rank not in this.active or rank in this.entered or rank in this.at_barrier:
            raise TrainingError(
                f"rank {rank} contributed a window out of order in epoch {report.epoch}, step "
                f"{report.step}"
            )

    def require_end_of_epoch(self, member: Member) -> None:
        """Check that a leaving rank leaves nobody waiting for it.

        Raises:
            TrainingError: it does.
        """
        this = self._round
        under_way = this.entered or this.held or this.through
        if self._gathers.present is not None:
            what = "while others wait for it in an exchange among the workers"
        elif under_way or self._committed.has_windows:
            what = f"before the end of epoch {self._committed.epoch}. {ONE_LAST_WINDOW}"
        else:
            return
        raise TrainingError(f"{member} left the run {what}")
