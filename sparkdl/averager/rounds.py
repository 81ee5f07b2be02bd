"""Who takes part in a round, when it is complete, and what came out: the averager without sockets.

    join:       every rank, as soon as it runs, and again whenever it comes back
    ready:      every rank, once it has read its rows; returns when all have and the driver, who is
                told what they found, has let them start; for one that comes back, as soon as the
                next round can begin with it
    contribute: every active rank, once a round; returns the reply when the round is committed
    gather:     every rank, equally often, at any time after it was let start
    a rank whose window was its last of the epoch is no longer active; its reply comes when no rank
    has rows left, that is with the epoch's final center. Then all are active again.

Every method is called from the thread that serves one worker. A failure ends the run: it is raised
in every thread that waits here, and in the driver's.

A rank is overdue when someone waits for it and nothing was heard of it for longer than it is
granted. Whoever waits notices, and so does the driver's thread, which looks at regular intervals.

Workers may be lost, as often as the run tolerates. Rounds go on without them; a round that had part
of a lost worker's contribution starts over from what the others still hold (``StartOverError``).
Positions count only what was committed, and an epoch ends when every rank is through with it, so
that a worker who comes back goes on behind its last committed window and no row is counted twice.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.accumulator import Accumulator, Receive
from sparkdl.averager.codec import Codec
from sparkdl.averager.members import Member, Members, Tolerance
from sparkdl.averager.progress import Position, Progress
from sparkdl.averager.saving import CheckpointPlan, Saving
from sparkdl.averager.wire import chunk_bytes, plan_chunks
from sparkdl.errors import (
    DataError,
    DeadlineError,
    SparkDLError,
    StoppedError,
    TrainingError,
)
from sparkdl.events import (
    EpochSummary,
    ValidationReport,
    WindowReport,
    summarize_epoch,
    with_validation,
)
from sparkdl.feed.facts import DataFacts, ShardFacts
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

Event = DataFacts | WindowReport | EpochSummary


class StartOverError(Exception):
    """A member of the round was lost: the same contribution is needed once more."""


class Rounds:
    """The center and its rounds.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers.
        codec: what the replies are and how the mean becomes the center.
        deadline_s: the longest that a rank may be silent while it is waited for, in seconds.
        progress: how far the training has come already; by default it starts.
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
        plan: CheckpointPlan | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        progress = progress or Progress.start(world_size)
        self.layout = layout
        self.chunk_bytes = chunk_bytes(world_size)
        self.chunks = plan_chunks(layout, self.chunk_bytes)
        self.center = list(center)
        self.world_size = world_size
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.failure: SparkDLError | None = None
        self.deadline_s = deadline_s
        self._codec = codec
        self._wire_dtypes = [codec.wire_dtype(segment) for segment in layout]
        self._spare = [torch.empty_like(segment) for segment in center]
        self._reply = self.center
        self._condition = threading.Condition()
        self._members = Members(world_size, deadline_s, tolerance or Tolerance())
        self._everyone = self._members.everyone
        self._shards: dict[int, ShardFacts] = {}
        self._gathers: dict[int, dict[int, object]] = {}
        self._gathered = dict.fromkeys(self._everyone, 0)
        self._started = False
        self._pending: set[int] = set()
        self._admitted: set[int] = set()
        self._knocking: set[int] = set()
        self._arrived: set[int] = set()
        self._complete: set[int] = set()
        self._adding: set[Member] = set()
        self._readers: set[int] = set()
        self._finished: set[int] = set()
        self._round = 0
        self._restarts = 0
        self._epoch = progress.epoch
        self._epoch_first_round = -progress.rounds
        self._epoch_started = time.monotonic()
        self._positions = list(progress.positions)
        self._windows: list[WindowReport] = []
        self._reports = list(progress.reports)
        self._history = list(progress.history)
        self._validations: dict[tuple[int, int], ValidationReport] = {}
        self._accumulator: Accumulator | None = None
        self._plan = plan
        self._saving: Saving | None = None
        self._save_asked = False
        self._saved_round = 0
        self._after_saving: SparkDLError | None = None

    def join(
        self,
        rank: int,
        host: str,
        attempt: int = 0,
        interrupt: Callable[[], None] = lambda: None,
    ) -> Member:
        """Enter the run, for the first time or again.

        Args:
            rank: the worker's rank.
            host: where it runs, for messages.
            attempt: of its task.
            interrupt: ends its connection; called when it is dropped.

        Raises:
            TrainingError: the rank is not one of this run's, or has joined already.
            FencedError: a later attempt of the task has joined.
        """
        with self._condition:
            self._raise_if_failed()
            member = Member(rank, host, attempt, interrupt)
            before = self._members.join(member)
            if before is not None:
                self._lose(before, "was replaced before its connection was known to be lost")
            return member

    def lose(self, member: Member, why: str) -> None:
        """Go on without a worker.

        Args:
            member: who it is.
            why: for messages; follows "rank r on host".
        """
        with self._condition:
            if self.failure is None and not member.gone and member.rank not in self._finished:
                self._lose(member, why)

    def still_reading(self, rank: int) -> None:
        """Take note that a rank is alive and reads its rows.

        Raises:
            StoppedError: the run failed elsewhere, so that the rank need not go on.
        """
        with self._condition:
            self._raise_if_failed()
            self.hear(rank)

    def ready(self, rank: int, shard: ShardFacts, on_wait: Callable[[], None]) -> None:
        """Say that a rank has read its rows, and wait until it may take the center.

        Args:
            rank: the worker's rank.
            shard: what it found.
            on_wait: called now and then while others still read.

        Raises:
            DataError: the rank has come back, and its rows are not what they were.
            DeadlineError: a rank did not start, or was silent while it read.
            StoppedError: the driver refused the data, or the run failed elsewhere.
        """
        with self._condition:
            self._raise_if_failed()
            member = self._members.of(rank)
            self._note_shard(rank, shard)
            if self._started and rank not in self._admitted:
                self._knocking.add(rank)
                if self._accumulator is None and not self._adding:
                    self._admit()
                self._commit_if_complete()
        while True:
            with self._condition:
                if self._wait(
                    lambda: rank in self._admitted, member, at_most_s=self.deadline_s / 4
                ):
                    return
            on_wait()

    def gather(self, rank: int, value: object, on_wait: Callable[[], None]) -> list[object]:
        """Wait until every rank has called this as often as this one; returns all values by rank.

        Args:
            rank: the worker's rank.
            value: what the others are to know.
            on_wait: called now and then while others are still to come.

        Raises:
            DeadlineError: a rank stayed away.
            StoppedError: the run failed elsewhere.
        """
        with self._condition:
            self._raise_if_failed()
            self.hear(rank)
            number = self._gathered[rank]
            self._gathered[rank] += 1
            values = self._gathers.setdefault(number, {})
            values[rank] = value
            if len(values) == self.world_size:
                del self._gathers[number]
                self._members.hear(self._everyone)
                self._condition.notify_all()
            member = self._members.of(rank)
        while True:
            with self._condition:
                if self._wait(
                    lambda: len(values) == self.world_size, member, at_most_s=self.deadline_s / 4
                ):
                    return [values[other] for other in sorted(self._everyone)]
            on_wait()

    def validated(self, report: ValidationReport) -> None:
        """Add to an epoch's summary what a rank found on its held-out rows."""
        with self._condition:
            self._raise_if_failed()
            self.hear(report.rank)
            self._validations[report.epoch, report.rank] = report
            for index, summary in enumerate(self._history):
                if summary.epoch == report.epoch:
                    self._history[index] = with_validation(summary, self._validations.values())

    def start(self) -> None:
        """Let the workers train; called by the driver once it has looked at the data's facts."""
        with self._condition:
            self._started = True
            self._admitted = self._members.there & self._shards.keys()
            self._start_epoch()
            self._condition.notify_all()

    def position(self, rank: int) -> Position:
        """Where a rank goes on: behind its last committed window."""
        with self._condition:
            return self._positions[rank]

    @property
    def mean_weight(self) -> float:
        """Of the rows of all ranks; known once all were let start."""
        with self._condition:
            return self._facts().mean_weight

    @property
    def committed(self) -> bool:
        """Whether there was a round in this run."""
        return self._round > 0

    @property
    def losses(self) -> list[str]:
        """Which workers were lost, and why."""
        with self._condition:
            return list(self._members.losses)

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended."""
        with self._condition:
            return list(self._history)

    def hear(self, rank: int) -> None:
        """Take note that a rank is alive: something of it arrived, or it took something."""
        self._members.hear([rank])

    def contribute(
        self,
        report: WindowReport,
        receive: Receive,
        scratch: Tensor,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Add one worker's contribution and wait for the outcome.

        Args:
            report: what was trained on; ``report.examples`` weigh the contribution.
            receive: fetches its chunks in the order of ``chunks``; not called without examples.
            scratch: ``chunk_bytes`` bytes to receive into, kept from round to round by the caller.
            on_progress: called for each round that ends while the outcome is still to come, which
                happens to ranks that are done with the epoch.

        Returns:
            What to send, a tensor a segment: the epoch's final center after the last window, else
            the codec's reply. ``release`` it once sent.

        Raises:
            StartOverError: another worker was lost; contribute the same once more.
            DeadlineError: a rank that is waited for was silent too long.
            StoppedError: the run failed elsewhere, or the worker's place was taken.
        """
        with self._condition:
            member = self._members.of(report.rank)
        accumulator, restarts = self._enter(report, member)
        self._add(report, member, accumulator, receive, scratch)
        with self._condition:
            self._raise_if_failed()
            self._raise_if_started_over(restarts)
            epoch, number = self._epoch, self._round
            self._windows.append(report)
            self._complete.add(report.rank)
            # Who waited for its turn to add could not be heard of.
            self._members.hear(self._arrived - self._complete)
            self._commit_if_complete()
            self._wait(lambda: self._round > number or self._restarts > restarts, member)
            if self._round == number:
                raise StartOverError
            if not report.last:
                return self._reply
            number = self._round
        while True:
            with self._condition:
                if self._epoch > epoch:
                    return self.center
            on_progress()
            with self._condition:
                self._wait(lambda ended=number: self._round > ended, member)  # type: ignore[misc]
                number = self._round

    def release(self, rank: int) -> None:
        """Say that a reply was sent; the next round's sums may then overwrite it."""
        with self._condition:
            self._readers.discard(rank)
            if not self._readers:
                self._members.hear(self._admitted)
            self._condition.notify_all()

    def saving_of(self, rank: int) -> Saving | None:
        """The checkpoint that waits for a rank's own state, if there is one."""
        with self._condition:
            saving = self._saving
            return saving if saving is not None and saving.awaits(rank) else None

    def save(self, saving: Saving) -> None:
        """Finish a checkpoint, now that every rank's own state has been written."""
        # Without the lock: until it is done, nobody contributes to the next round.
        saving.publish(self.layout, self.center)
        with self._condition:
            self._saving = None
            self._saved_round = self._round
            self._members.hear(self._everyone)
            self._condition.notify_all()
            if self._after_saving is not None:
                self.fail(self._after_saving)

    def save_center(self) -> None:
        """Write a checkpoint of the last commit after a failure, without the workers' own states.

        Nothing if that commit has become a checkpoint already, or nothing was committed.
        """
        with self._condition:
            # Nothing is committed after a failure, so the center stays as it is.
            assert self.failure is not None
            if self._plan is None or self._saved_round == self._round:
                return
            saving = Saving(self._plan, self._progress(), self._data(), ())
        saving.publish(self.layout, self.center)

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run behind the next commit, when that has become a checkpoint."""
        with self._condition:
            self._save_asked = self._saving is None
            self._after_saving = reason

    def finish(self, rank: int) -> None:
        """Leave the run for good, after the last epoch."""
        with self._condition:
            self._finished.add(rank)
            if len(self._finished) == self.world_size:
                self.events.put(None)

    def fail(self, error: SparkDLError) -> None:
        """End the run; later failures are consequences of the first and are dropped."""
        with self._condition:
            if self.failure is None and len(self._finished) < self.world_size:
                # Who was told to end may see the workers end too.
                self.failure = self._after_saving or error
                if self._accumulator is not None:
                    self._accumulator.stop()
                self.events.put(None)
            self._condition.notify_all()

    def check_deadline(self) -> None:
        """Look whether a rank that is waited for has been silent too long, and drop it if allowed.

        Raises:
            DeadlineError: it has, and cannot be dropped; the message names it and what it was
                waited for.
        """
        with self._condition:
            if self.failure is not None:
                return
            saving = self._saving
            if saving is not None and time.monotonic() - saving.started > self.deadline_s:
                raise DeadlineError(
                    f"the checkpoint before epoch {self._epoch} was not written within "
                    f"{self.deadline_s:g} s. Is the storage of checkpointPath slow or gone?"
                )
            silent = self._members.overdue(self._waited_for())
            present = silent & self._members.there
            if present and self._members.tolerance.max_failures and self._started:
                for rank in sorted(present):
                    patience = self._members.patience_s(rank)
                    what = self._what_is_missing({rank})
                    self._lose(self._members.of(rank), f"{what} within {patience:.1f} s")
                self._members.double_patience()
            elif silent:
                late = (silent - self._members.joined) or silent
                raise DeadlineError(
                    f"{self._members.name(late)} {self._what_is_missing(late)} within "
                    f"{self.deadline_s:g} s. If it takes longer here, raise the estimator's "
                    "'timeout'"
                )

    def _enter(self, report: WindowReport, member: Member) -> tuple[Accumulator, int]:
        rank = report.rank
        with self._condition:
            self._members.measure_window(rank)
            self.hear(rank)
            # What was being added when a round started over must not reach the new sum.
            self._wait(
                lambda: (
                    not self._readers
                    and self._saving is None
                    and (self._accumulator is not None or not self._adding)
                ),
                member,
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
            self._accumulator.declare(rank, report.examples)
            return self._accumulator, self._restarts

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
            received += 1

        try:
            for index in range(len(self.chunks) if report.examples else 0):
                accumulator.add(report.rank, index, counted, scratch, 2 * self.deadline_s)
                self.hear(report.rank)
        except StoppedError:
            with self._condition:
                self._adding.discard(member)
                self._condition.notify_all()
                self._raise_if_failed()
                self._members.require(member)
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

    def _lose(self, member: Member, why: str) -> None:
        """Take a worker out of everything that is under way."""
        rank = member.rank
        error = self._members.lose(member, why)
        if error is not None:
            self.fail(error)
            return
        logger.warning("%s; going on with the others until it comes back", self._members.losses[-1])
        self._readers.discard(rank)
        self._admitted.discard(rank)
        self._knocking.discard(rank)
        if self._accumulator is not None and rank not in self._complete:
            if rank in self._arrived:
                self._start_over()
            elif rank in self._accumulator.ranks:
                self._accumulator.declare(rank, 0)
        if self._saving is not None and self._saving.forgo(rank):
            self._save_in_background(self._saving)
        # Who waited for the lost one could not be heard of.
        self._members.hear(self._admitted)
        self._commit_if_complete()
        self._condition.notify_all()

    def _start_over(self) -> None:
        """Forget what was added: the sum has part of a contribution that will never be whole."""
        assert self._accumulator is not None
        self._accumulator.stop()
        self._accumulator = None
        self._restarts += 1
        self._arrived, self._complete, self._windows = set(), set(), []
        self._admit()

    def _admit(self) -> None:
        """Let those in who came back; they read the center before the next round."""
        self._admitted |= self._knocking
        # Who was through with the epoch says so once more, with a window of no weight.
        self._pending |= self._knocking
        self._readers |= self._knocking
        self._members.hear(self._knocking)
        self._knocking = set()
        self._condition.notify_all()

    @property
    def _active(self) -> set[int]:
        return self._pending & self._admitted

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
        self._round += 1
        self._count_windows()
        self._accumulator = None
        self._readers = self._arrived & self._active
        self._arrived, self._complete = set(), set()
        if not self._pending:
            self._end_epoch()
        self._admit()
        if self._plan is not None and self._save_asked:
            self._save_asked = False
            self._begin_saving(self._plan)
        self._members.hear(self._everyone)
        self._condition.notify_all()

    def _count_windows(self) -> None:
        """Now that the round is committed, its windows have happened."""
        for report in sorted(self._windows, key=lambda window: window.rank):
            self._positions[report.rank] = Position.after(report)
            self._reports.append(report)
            self.events.put(report)
            if report.last:
                self._pending.discard(report.rank)
        self._windows = []

    def _end_epoch(self) -> None:
        seconds = time.monotonic() - self._epoch_started
        rounds = self._round - self._epoch_first_round
        summary = summarize_epoch(self._epoch, self._reports, rounds, seconds)
        self._history.append(summary)
        self.events.put(summary)
        self._epoch += 1
        self._epoch_first_round = self._round
        self._positions = [position.next_epoch() for position in self._positions]
        self._reports = []
        self._readers = set(self._admitted)
        if self._plan is not None and self._plan.due(summary.epoch):
            self._save_asked = True
        self._start_epoch()

    def _begin_saving(self, plan: CheckpointPlan) -> None:
        self._saving = Saving(plan, self._progress(), self._data(), self._admitted)
        if not self._admitted:
            self._save_in_background(self._saving)

    def _save_in_background(self, saving: Saving) -> None:
        """Finish a checkpoint whose last missing worker will not send anything."""
        threading.Thread(
            target=self.save, args=(saving,), name="sparkdl-saving", daemon=True
        ).start()

    def _progress(self) -> Progress:
        return Progress(
            epoch=self._epoch,
            rounds=self._round - self._epoch_first_round,
            positions=tuple(self._positions),
            reports=tuple(self._reports),
            history=tuple(self._history),
        )

    def _data(self) -> dict[str, Any]:
        return self._facts().lasting()

    def _facts(self) -> DataFacts:
        return DataFacts.of([self._shards[rank] for rank in sorted(self._everyone)])

    def _note_shard(self, rank: int, shard: ShardFacts) -> None:
        if any(len(s.columns) != len(shard.columns) for s in self._shards.values()):
            raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, others do not")
        before = self._shards.get(rank)
        # As text, because NaN differs from itself.
        if before is not None and repr(before) != repr(shard):
            raise DataError(
                f"rank {rank} was started again and read other rows than before ({shard.rows} rows "
                f"now, {before.rows} then): the DataFrame is not the same each time it is computed "
                "(rand() without a seed, a limit, a changing source?). Persist or write it first"
            )
        self._shards[rank] = shard
        if before is None and len(self._shards) == self.world_size:
            self.events.put(self._facts())

    def _start_epoch(self) -> None:
        self._pending = set(self._everyone)
        self._epoch_started = time.monotonic()
        self._members.hear(self._everyone)

    def _wait(
        self, condition: Callable[[], bool], member: Member, at_most_s: float = math.inf
    ) -> bool:
        """Wait for a condition, as long as nobody is overdue; returns whether it came true."""
        until = time.monotonic() + at_most_s
        while True:
            due = self._members.next_due(self._waited_for())
            met = self._condition.wait_for(
                lambda: self.failure is not None or member.gone or condition(),
                timeout=max(0.01, min(due, until) - time.monotonic()),
            )
            self._raise_if_failed()
            self._members.require(member)
            if met or time.monotonic() >= until:
                return met
            self.check_deadline()

    def _waited_for(self) -> set[int]:
        if not self._started:
            return set(self._everyone - self._shards.keys())
        if self._gathers:
            return set(self._everyone - self._gathers[min(self._gathers)].keys())
        if self._readers:
            return self._readers - self._finished
        if self._saving is not None:
            return {rank for rank in self._everyone if self._saving.awaits(rank)}
        late = self._active - self._arrived
        # Who adds waits for its turn: only the first can always go on, if it is not late itself.
        first = min(late | (self._arrived - self._complete), default=None)
        missing = late if first is None else late | {first}
        if len(self._admitted) < self._members.tolerance.min_workers:
            missing |= self._everyone - self._admitted
        elif not missing:
            # Everyone who is here waits for those who are not.
            missing |= self._pending - self._admitted
        return missing - self._finished

    def _what_is_missing(self, ranks: set[int]) -> str:
        joined = self._members.joined
        if not ranks <= joined:
            return (
                f"did not start ({len(joined)} of {self.world_size} workers did; all have to "
                "run at once: are other jobs using the cluster?)"
            )
        if not ranks & self._members.there:
            reasons = "; ".join(self._members.last_loss(rank) for rank in sorted(ranks))
            return f"did not come back ({reasons}; is there a slot to start it again?)"
        if not self._started:
            return "did not receive more of its rows"
        if self._gathers:
            return "did not take part in what the workers exchange among themselves"
        if self._readers:
            return f"did not take the center of round {self._round}"
        if self._saving is not None:
            return f"did not send its own state for the checkpoint before epoch {self._epoch}"
        return f"did not contribute to round {self._round + 1} (epoch {self._epoch})"

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")

    def _raise_if_started_over(self, restarts: int) -> None:
        if self._restarts > restarts:
            raise StartOverError
