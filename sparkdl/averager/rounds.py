"""When a round is complete, and what came out: the averager without sockets.

    contribute: every active rank, once a round; returns the reply when the round is committed
    a rank whose window was its last of the epoch is no longer active; its reply comes when no rank
    has rows left, that is with the epoch's final center. Then all are active again.

Workers may be lost, as often as the run tolerates. Rounds go on without them; a round that had part
of a lost worker's contribution starts over from what the others still hold (``StartOverError``).
Positions count only what was committed, and an epoch ends when every rank is through with it, so
that a worker who comes back goes on behind its last committed window and no row is counted twice.

``attendance.py`` has who takes part at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparkdl.averager.accumulator import Accumulator, Receive
from sparkdl.averager.checkpoints import Checkpoints
from sparkdl.averager.codec import Codec
from sparkdl.averager.finite import require_finite
from sparkdl.averager.kept import KeptState
from sparkdl.averager.members import Member, Tolerance
from sparkdl.averager.progress import Position, Progress
from sparkdl.averager.saving import CheckpointPlan
from sparkdl.averager.tally import Tally
from sparkdl.averager.wire import chunk_bytes, plan_chunks
from sparkdl.errors import StoppedError, TrainingError
from sparkdl.events import EpochSummary, ValidationReport, WindowReport
from sparkdl.protocols import Layout

ONE_LAST_WINDOW = (
    "A strategy has to exchange exactly one window with last=True in each epoch, on every rank"
)


class StartOverError(Exception):
    """A member of the round was lost: the same contribution is needed once more."""


class Rounds(Checkpoints):
    """The center and its rounds.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers.
        codec: what the replies are and how the mean becomes the center.
        deadline_s: the longest that a rank may be silent while it is waited for, in seconds.
        progress: how far the training has come already; by default it starts.
        kept: what was kept of each rank at its last commit; by default nothing.
        plan: which commits become checkpoints; none by default.
        tolerance: what losses the run survives; none by default.
    """

    def __init__(
        self,
        layout: Layout,
        center: Sequence[Tensor],
        world_size: int,
        codec: Codec,
        deadline_s: float,
        *,
        progress: Progress | None = None,
        kept: Mapping[int, KeptState] | None = None,
        plan: CheckpointPlan | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        super().__init__(
            world_size,
            deadline_s,
            tolerance or Tolerance(),
            layout=layout,
            center=center,
            tally=Tally(progress or Progress.start(world_size), kept or {}),
            plan=plan,
        )
        self.chunk_bytes = chunk_bytes(world_size)
        self.chunks = plan_chunks(layout, self.chunk_bytes)
        self._codec = codec
        self._wire_dtypes = [codec.wire_dtype(segment) for segment in layout]
        self._spare = [torch.empty_like(segment) for segment in center]
        self._reply = self.center
        self._accumulator: Accumulator | None = None
        self._arrived: set[int] = set()
        self._complete: set[int] = set()
        self._adding: set[Member] = set()
        self._windows: list[WindowReport] = []
        self._kept: dict[int, KeptState] = {}
        self._restarts = 0

    def validated(self, report: ValidationReport) -> None:
        """Add to an epoch's summary what a rank found on its held-out rows."""
        with self._condition:
            self._raise_if_failed()
            self.hear(report.rank)
            self._tally.validated(report)

    def position(self, rank: int) -> Position:
        """Where a rank goes on: behind its last committed window."""
        with self._condition:
            return self._tally.positions[rank]

    def kept_state(self, rank: int) -> KeptState | None:
        """What is kept of a rank since its last committed window; None if that sent nothing."""
        with self._condition:
            return self._tally.kept.get(rank)

    @property
    def kept(self) -> dict[int, KeptState]:
        """What is kept of each rank."""
        with self._condition:
            return dict(self._tally.kept)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the center is the final one of an epoch."""
        with self._condition:
            return self._tally.at_end_of_epoch

    @property
    def begun(self) -> bool:
        """Whether the center is more than the initial one."""
        return self._tally.begun

    @property
    def progress(self) -> Progress:
        """How far the training has come."""
        with self._condition:
            return self._tally.progress()

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended."""
        with self._condition:
            return list(self._tally.history)

    def contribute(
        self,
        member: Member,
        report: WindowReport,
        receive: Receive,
        scratch: Tensor,
        on_progress: Callable[[], None] = lambda: None,
        kept: KeptState | None = None,
    ) -> list[Tensor]:
        """Add one worker's contribution and wait for the outcome.

        Args:
            member: the worker.
            report: what was trained on; ``report.weight`` is that of the contribution.
            receive: fetches its chunks in the order of ``chunks``; not called without weight.
            scratch: ``chunk_bytes`` bytes to receive into, kept from round to round by the caller.
            on_progress: called for each round that ends while the outcome is still to come, which
                happens to ranks that are done with the epoch.
            kept: what is to be kept of the worker, should all start again from this round; None for
                nothing.

        Returns:
            What to send, a tensor a segment: the epoch's final center after the last window, else
            the codec's reply. ``release`` it once sent.

        Raises:
            NonFiniteError: it holds NaN or infinity, which are not added.
            StartOverError: another worker was lost; contribute the same once more.
            DeadlineError: a rank that is waited for was silent too long.
            StoppedError: the run failed elsewhere, or the worker's place was taken.
        """
        accumulator, restarts = self._enter(report, member)
        self._add(report, member, accumulator, receive, scratch)
        with self._condition:
            self._raise_if_failed()
            self._raise_if_started_over(restarts)
            epoch, number = self._tally.epoch, self._tally.round
            self._windows.append(report)
            if kept is not None:
                self._kept[report.rank] = kept
            self._complete.add(report.rank)
            # Who waited for its turn to add could not be heard of.
            self._members.hear(self._arrived - self._complete)
            self._commit_if_complete()
            self._wait(lambda: self._tally.round > number or self._restarts > restarts, member)
            if self._tally.round == number:
                raise StartOverError
            if not report.last:
                return self._reply
            number = self._tally.round
        while True:
            with self._condition:
                if self._tally.epoch > epoch:
                    return self.center
            on_progress()
            with self._condition:
                self._wait(lambda ended=number: self._tally.round > ended, member)  # type: ignore[misc]
                number = self._tally.round

    def finish(self, member: Member) -> None:
        """Leave the run for good, after the last epoch and its checkpoint.

        Raises:
            TrainingError: an epoch is under way, or an exchange among the workers, in which the
                others would wait for this one for ever.
        """
        with self._condition:
            if self._gathers or self._arrived or self._tally.epoch_is_under_way:
                self._require(member)
                what = f"in epoch {self._tally.epoch}, which is not over. {ONE_LAST_WINDOW}"
                if self._gathers:
                    what = "while others wait for it in what the workers exchange among themselves"
                raise TrainingError(f"{self._members.name([member.rank])} has left the run {what}")
        super().finish(member)

    def release(self, member: Member) -> None:
        """Say that a reply was sent; the next round's sums may then overwrite it."""
        with self._condition:
            self._require(member)
            self._readers.discard(member.rank)
            if not self._readers:
                self._members.hear(self._admitted)
            self._condition.notify_all()

    def _enter(self, report: WindowReport, member: Member) -> tuple[Accumulator, int]:
        rank = report.rank
        with self._condition:
            self._require(member)
            self._members.measure_window(rank)
            self.hear(rank)
            self._wait_to_enter(report, member)
            self._require_everyone(rank, f"contributed a window of epoch {report.epoch}")
            if report.epoch != self._tally.epoch:
                raise TrainingError(
                    f"{self._members.name([rank])} contributed a window of epoch {report.epoch}, "
                    f"but the run is in epoch {self._tally.epoch}. {ONE_LAST_WINDOW}"
                )
            if rank not in self._active or rank in self._arrived:
                raise TrainingError(
                    f"rank {rank} contributed out of turn in epoch {report.epoch}, "
                    f"step {report.step}"
                )
            if self._accumulator is None:
                self._accumulator = Accumulator(
                    self.layout,
                    self._wire_dtypes,
                    self.chunks,
                    self._spare,
                    sorted(self._active),
                )
            self._arrived.add(rank)
            self._adding.add(member)
            self._accumulator.declare(rank, report.weight)
            return self._accumulator, self._restarts

    def _wait_to_enter(self, report: WindowReport, member: Member) -> None:
        self._held.add(report.rank)
        try:
            # What was being added when a round started over must not reach the new sum.
            self._wait(
                lambda: (
                    not self._readers
                    and not self._must_wait_for_saving(report)
                    and (self._accumulator is not None or not self._adding)
                ),
                member,
            )
        finally:
            self._held.discard(report.rank)
            self.hear(report.rank)

    def _add(
        self,
        report: WindowReport,
        member: Member,
        accumulator: Accumulator,
        receive: Receive,
        scratch: Tensor,
    ) -> None:
        """Add the chunks of a contribution as they arrive."""
        received = 0

        def counted(into: Tensor) -> None:
            nonlocal received
            receive(into)
            require_finite(into, report)
            received += 1

        try:
            for index in range(len(self.chunks) if report.weight else 0):
                accumulator.add(report.rank, index, counted, scratch, 2 * self.deadline_s)
                self.hear(report.rank)
        except StoppedError:
            with self._condition:
                self._adding.discard(member)
                self._condition.notify_all()
                self._require(member)
            # The round starts over; what the worker has sent already is of no use.
            for chunk in self.chunks[received:]:
                dtype = self._wire_dtypes[chunk.segment]
                receive(scratch[: (chunk.stop - chunk.start) * dtype.itemsize].view(dtype))
                self.hear(report.rank)
            raise StartOverError from None
        finally:
            with self._condition:
                self._adding.discard(member)
                self._condition.notify_all()

    def _start_over(self) -> None:
        """Forget what was added: the sum has part of a contribution that will never be whole."""
        assert self._accumulator is not None
        self._accumulator.stop()
        self._accumulator = None
        self._restarts += 1
        self._arrived, self._complete, self._windows, self._kept = set(), set(), [], {}
        self._admit()

    def _commit_if_complete(self) -> None:
        """Commit the round if everyone who takes part in it has contributed."""
        enough = len(self._admitted | self._knocking) >= self._members.tolerance.min_workers
        if (
            self._accumulator is not None
            and self._complete == self._arrived
            and self._active <= self._complete
            and enough
        ):
            self._commit()

    def _commit(self) -> None:
        """Make the round's mean the new center; called by whoever completes the round."""
        assert self._accumulator is not None
        if self._accumulator.finish():
            old = self.center
            self.center, self._reply = self._codec.commit(self.center, self._spare)
            self._spare = old if self.center is self._spare else self._spare
        else:
            self._reply = self._codec.unchanged(self.center, self._spare)
        self._count_windows()
        self._accumulator = None
        self._readers = self._arrived & self._active
        self._arrived, self._complete = set(), set()
        if not self._pending:
            self._end_epoch()
        # Before those are let in who come back: what they know is not of this commit, and nobody
        # asks them for it.
        self._save_if_due()
        self._admit()
        self._members.hear(self._everyone)
        self._condition.notify_all()

    def _count_windows(self) -> None:
        """Now that the round is committed, its windows have happened."""
        windows = sorted(self._windows, key=lambda window: window.rank)
        self._tally.commit(windows, self._kept)
        for report in windows:
            self.events.put(report)
            if report.last:
                self._pending.discard(report.rank)
        self._windows, self._kept = [], {}

    def _end_epoch(self) -> None:
        summary = self._tally.end_epoch()
        self.events.put(summary)
        self._readers = set(self._admitted)
        self._note_end_of_epoch(summary.epoch)
        self._await_everyone()

    def _raise_if_started_over(self, restarts: int) -> None:
        if self._restarts > restarts:
            raise StartOverError

    def _on_start(self) -> None:
        self._tally.start_epoch()

    def _on_return(self) -> None:
        if self._accumulator is None and not self._adding:
            self._admit()
        self._commit_if_complete()

    def _on_loss(self, rank: int) -> None:
        if self._accumulator is not None and rank not in self._complete:
            if rank in self._arrived:
                self._start_over()
            elif rank in self._accumulator.ranks:
                self._accumulator.declare(rank, 0)
        self._forgo_own_state(rank)
        self._commit_if_complete()

    def _on_failure(self) -> None:
        if self._accumulator is not None:
            self._accumulator.stop()

    def _waited_for_in_round(self) -> set[int]:
        if self._readers:
            return self._readers
        if self._saving is not None and self._saving.awaited:
            return set(self._saving.awaited)
        late = self._active - self._arrived - self._held
        # Who adds waits for its turn: only the first can always go on, if it is not late itself.
        first = min(late | (self._arrived - self._complete), default=None)
        missing = late if first is None else late | {first}
        if len(self._admitted) < self._members.tolerance.min_workers:
            missing |= self._everyone - self._admitted
        elif not missing:
            # Everyone who is here waits for those who are not.
            missing |= self._pending - self._admitted
        return missing

    def _what_the_round_misses(self) -> str:
        if self._readers:
            return f"did not take the center of round {self._tally.round}"
        epoch = self._tally.epoch
        if self._saving is not None and self._saving.awaited:
            return f"did not send its own state for the checkpoint before epoch {epoch}"
        return f"did not contribute to round {self._tally.round + 1} (epoch {epoch})"
