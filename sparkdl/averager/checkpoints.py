"""Which commits of a run become checkpoints; they are written while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.averager.attendance import Attendance
from sparkdl.averager.members import Member, Tolerance
from sparkdl.averager.saving import CheckpointPlan, Saving
from sparkdl.averager.tally import Tally
from sparkdl.errors import CheckpointError, DeadlineError, SparkDLError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout

CLOSE_S = 5.0
"""Seconds to wait, when the run has failed, for a checkpoint that is being written."""


class Checkpoints(Attendance):
    """The center, what has been committed of it, and the checkpoint that is being written.

    One at a time: the round behind which the next is due waits for the one before.

    Args:
        world_size: number of workers.
        deadline_s: the longest that a rank may be silent, and a checkpoint be written, in seconds.
        tolerance: what losses the run survives.
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        tally: how far its training has come.
        plan: which commits become checkpoints; None for none.
    """

    def __init__(
        self,
        world_size: int,
        deadline_s: float,
        tolerance: Tolerance,
        *,
        layout: Layout,
        center: Sequence[Tensor],
        tally: Tally,
        plan: CheckpointPlan | None,
    ) -> None:
        super().__init__(world_size, deadline_s, tolerance)
        self.layout = layout
        self.center = list(center)
        self._tally = tally
        self._plan = plan
        self._saving: Saving | None = None
        self._paused_before_saving_s = 0.0
        self._writer: threading.Thread | None = None
        # In the same place for every checkpoint, lest the memory be in many pieces.
        self._copy: list[Tensor] = []
        self._save_asked = False
        # Rounds that had been committed when the last checkpoint was begun.
        self._saved_round = 0

    def saving_of(self, rank: int) -> Saving | None:
        """The checkpoint that waits for a rank's own state, if there is one."""
        with self._condition:
            saving = self._saving
            return saving if saving is not None and saving.awaits(rank) else None

    def save(self, saving: Saving) -> None:
        """Finish a checkpoint in the background, now that every rank's own state is there."""
        self._writer = threading.Thread(
            target=self._write, args=(saving,), name="sparkdl-saving", daemon=True
        )
        self._writer.start()

    def save_center(self) -> None:
        """Write a checkpoint of the last commit after a failure, without the workers' own states.

        Nothing if that commit has become a checkpoint already, or nothing was committed.
        """
        with self._condition:
            # Nothing is committed after a failure, so the center stays as it is.
            assert self.failure is not None
            written = self._saving is None and self._saved_round == self._tally.round
            if self._plan is None or written:
                return
            saving = self._new_saving(self._plan, self.center, frozenset())
        saving.publish()

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run behind the next commit, when that has become a checkpoint."""
        with self._condition:
            self._save_asked = True
            self._told_to_end = reason

    def finish(self, member: Member) -> None:
        """Leave the run for good, after the last epoch and its checkpoint."""
        with self._condition:
            self._held.add(member.rank)
            # The driver's thread ends the run if that takes too long.
            self._condition.wait_for(lambda: self._saving is None or self.failure is not None)
        super().finish(member)

    def close(self) -> None:
        """Wait a little for a checkpoint that is still being written, or give it up."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)
        with self._condition:
            saving = self._saving
            is_writing = self._writer is not None and self._writer.is_alive()
        if saving is not None and not is_writing:
            saving.abandon()  # it waits for workers that have left

    def _write(self, saving: Saving) -> None:
        try:
            saving.publish()
        except Exception as error:  # a mistake of ours must not leave the workers waiting
            self.fail(CheckpointError(f"the thread that writes checkpoints: {error!r}"))
            raise
        with self._condition:
            self._saving = None
            self._members.hear(self._held)
            self._condition.notify_all()
            if self._told_to_end is not None and not self._save_asked:
                self.fail(self._told_to_end)

    def _must_wait_for_saving(self, report: WindowReport) -> bool:
        """Whether a round that this window belongs to may become a checkpoint before another is."""
        if self._plan is None or self._saving is None:
            return False
        rounds = self._tally.round + 1 - self._saved_round
        ends = self._told_to_end is not None
        return ends or report.last or self._plan.due_within(rounds)

    def _note_end_of_epoch(self, epoch: int) -> None:
        if self._plan is not None and self._plan.due(epoch):
            self._save_asked = True

    def _save_if_due(self) -> None:
        """Begin a checkpoint behind the commit that has just been."""
        if self._plan is None or self._saving is not None:
            return
        if self._save_asked or self._plan.due_within(self._tally.round - self._saved_round):
            self._save_asked = False
            self._saved_round = self._tally.round
            self._paused_before_saving_s = self._members.paused_s
            self._saving = self._new_saving(
                self._plan, self._copy_of_center(), frozenset(self._admitted)
            )
            if not self._admitted:
                self.save(self._saving)

    def _copy_of_center(self) -> list[Tensor]:
        """The center as it is now, for the next rounds overwrite it."""
        if not self._copy:
            self._copy = [torch.empty_like(segment) for segment in self.center]
        for copy, segment in zip(self._copy, self.center, strict=True):
            copy.copy_(segment)
        return self._copy

    def _new_saving(
        self, plan: CheckpointPlan, center: Sequence[Tensor], ranks: frozenset[int]
    ) -> Saving:
        data = self._shards.facts.lasting()
        return Saving(plan, self._tally.progress(), data, self.layout, center, ranks)

    def _forgo_own_state(self, rank: int) -> None:
        """Do without what a lost worker will not send."""
        if self._saving is not None and self._saving.forgo(rank):
            self.save(self._saving)

    def _check_saving(self) -> None:
        saving = self._saving
        if saving is None:
            return
        paused_s = self._members.paused_s - self._paused_before_saving_s
        if time.monotonic() - saving.started - paused_s > self.deadline_s:
            why = "Is the storage of checkpointPath slow or gone?"
            if saving.awaited:
                why = f"It still waits for the own state of {self._members.name(saving.awaited)}"
            raise DeadlineError(
                f"the checkpoint of epoch {saving.epoch} was not written within "
                f"{self.deadline_s:g} s. {why}"
            )
