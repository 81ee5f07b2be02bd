"""Who takes part in a round, when it is complete, and what came out: the averager without sockets.

    join:       every rank, once, as soon as it runs
    ready:      every rank, once it has read its rows; returns when all have and the driver, who is
                told what they found, has let them start
    contribute: every active rank, once a round; returns the reply when the round is committed
    gather:     every rank, equally often, at any time after it was let start
    a rank whose window was its last of the epoch is no longer active; its reply comes when no rank
    is active any more, that is with the epoch's final center. Then all are active again.

Every method is called from the thread that serves one worker. The first failure ends the run: it is
raised in every thread that waits here, and in the driver's.

A rank is overdue when someone waits for it and nothing was heard of it for ``deadline_s``. Whoever
waits notices, and so does the driver's thread, which looks at regular intervals.
"""

from __future__ import annotations

import dataclasses
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
from sparkdl.averager.progress import Position, Progress
from sparkdl.averager.saving import CheckpointPlan, Saving
from sparkdl.averager.wire import chunk_bytes, plan_chunks
from sparkdl.errors import DeadlineError, SparkDLError, StoppedError, TrainingError
from sparkdl.events import EpochSummary, WindowReport, summarize_epoch
from sparkdl.feed.facts import DataFacts, ShardFacts
from sparkdl.protocols import Layout

Event = DataFacts | WindowReport | EpochSummary


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
        self._everyone = frozenset(range(world_size))
        self._hosts: dict[int, str] = {}
        self._shards: dict[int, ShardFacts] = {}
        self._gathers: dict[int, dict[int, object]] = {}
        self._gathered = dict.fromkeys(self._everyone, 0)
        self._started = False
        self._heard = dict.fromkeys(self._everyone, time.monotonic())
        self._active: set[int] = set()
        self._arrived: set[int] = set()
        self._complete: set[int] = set()
        self._readers: set[int] = set()
        self._finished: set[int] = set()
        self._round = 0
        self._epoch = progress.epoch
        self._epoch_first_round = -progress.rounds
        self._epoch_started = time.monotonic()
        self._positions = list(progress.positions)
        self._windows: list[WindowReport] = []
        self._reports = list(progress.reports)
        self._history = list(progress.history)
        self._accumulator: Accumulator | None = None
        self._plan = plan
        self._saving: Saving | None = None
        self._save_asked = False
        self._saved_round = 0
        self._after_saving: SparkDLError | None = None

    def join(self, rank: int, host: str) -> None:
        """Enter the run.

        Args:
            rank: the worker's rank.
            host: where it runs, for messages.

        Raises:
            TrainingError: the rank is not one of this run's, or has joined already.
        """
        with self._condition:
            self._raise_if_failed()
            if rank not in self._everyone:
                raise TrainingError(
                    f"a task with rank {rank} on {host} joined a run of {self.world_size} workers: "
                    "Spark started more tasks than the run has workers"
                )
            if rank in self._hosts:
                raise TrainingError(
                    f"rank {rank} joined from {host}, but it has joined from {self._hosts[rank]} "
                    "before: Spark started the task a second time"
                )
            self._hosts[rank] = host
            self.hear(rank)

    def still_reading(self, rank: int) -> None:
        """Take note that a rank is alive and reads its rows.

        Raises:
            StoppedError: the run failed elsewhere, so that the rank need not go on.
        """
        with self._condition:
            self._raise_if_failed()
            self.hear(rank)

    def ready(self, rank: int, shard: ShardFacts, on_wait: Callable[[], None]) -> None:
        """Say that a rank has read its rows, and wait until training starts.

        Args:
            rank: the worker's rank.
            shard: what it found.
            on_wait: called now and then while others still read.

        Raises:
            DeadlineError: a rank did not start, or was silent while it read.
            StoppedError: the driver refused the data, or the run failed elsewhere.
        """
        with self._condition:
            self._raise_if_failed()
            if any(len(s.columns) != len(shard.columns) for s in self._shards.values()):
                raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, others do not")
            self._shards[rank] = shard
            if len(self._shards) == self.world_size:
                self.events.put(self._facts())
        while True:
            with self._condition:
                if self._wait(lambda: self._started, at_most_s=self.deadline_s / 4):
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
                self._heard = dict.fromkeys(self._everyone, time.monotonic())
                self._condition.notify_all()
        while True:
            with self._condition:
                if self._wait(
                    lambda: len(values) == self.world_size, at_most_s=self.deadline_s / 4
                ):
                    return [values[other] for other in sorted(self._everyone)]
            on_wait()

    def start(self) -> None:
        """Let the workers train; called by the driver once it has looked at the data's facts."""
        with self._condition:
            self._started = True
            self._start_epoch()
            self._condition.notify_all()

    def position(self, rank: int) -> Position:
        """Where a rank goes on: behind its last committed window."""
        with self._condition:
            return self._positions[rank]

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended."""
        with self._condition:
            return list(self._history)

    def hear(self, rank: int) -> None:
        """Take note that a rank is alive: something of it arrived, or it took something."""
        self._heard[rank] = time.monotonic()

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
            DeadlineError: a rank that is waited for was silent too long.
            StoppedError: the run failed elsewhere.
        """
        rank = report.rank
        accumulator = self._enter(report)
        accumulator.declare(rank, report.examples)
        if report.examples:
            for index in range(len(self.chunks)):
                accumulator.add(rank, index, receive, scratch, 2 * self.deadline_s)
                self.hear(rank)
        with self._condition:
            self._raise_if_failed()
            epoch, number = self._epoch, self._round
            self._windows.append(report)
            self._complete.add(rank)
            if report.last:
                self._active.discard(rank)
            if self._complete == self._arrived and self._active <= self._complete:
                self._commit()
        while True:
            with self._condition:
                self._wait(lambda ended=number: self._round > ended)  # type: ignore[misc]
                if not report.last:
                    return self._reply
                if self._epoch > epoch:
                    return self.center
                number = self._round
            on_progress()

    def release(self, rank: int) -> None:
        """Say that a reply was sent; the next round's sums may then overwrite it."""
        with self._condition:
            self._readers.discard(rank)
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
            self._heard = dict.fromkeys(self._everyone, time.monotonic())
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
        """Look whether a rank that is waited for has been silent too long.

        Raises:
            DeadlineError: it has; the message names it and what it was waited for.
        """
        with self._condition:
            limit = time.monotonic() - self.deadline_s
            if self._saving is not None and self._saving.started <= limit:
                raise DeadlineError(
                    f"the checkpoint of epoch {self._epoch} was not written within "
                    f"{self.deadline_s:g} s. Is the storage of checkpointPath slow or gone?"
                )
            silent = {rank for rank in self._waited_for() if self._heard[rank] <= limit}
            if silent:
                late = (silent - self._hosts.keys()) or silent
                raise DeadlineError(
                    f"{self._name(late)} {self._what_is_missing(late)} within "
                    f"{self.deadline_s:g} s. If it takes longer here, raise the estimator's "
                    "'timeout'"
                )

    def _enter(self, report: WindowReport) -> Accumulator:
        with self._condition:
            self.hear(report.rank)
            self._wait(lambda: not self._readers and self._saving is None)
            if report.rank not in self._active or report.rank in self._arrived:
                raise TrainingError(
                    f"rank {report.rank} contributed out of turn in epoch {report.epoch}, "
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
            self._arrived.add(report.rank)
            return self._accumulator

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
        if not self._active:
            self._end_epoch()
        if self._plan is not None and self._save_asked:
            self._save_asked = False
            self._begin_saving(self._plan)
        self._heard = dict.fromkeys(self._everyone, time.monotonic())
        self._condition.notify_all()

    def _count_windows(self) -> None:
        """Now that the round is committed, its windows have happened."""
        for report in sorted(self._windows, key=lambda window: window.rank):
            self._positions[report.rank] = Position.after(report)
            self._reports.append(report)
            self.events.put(report)
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
        self._readers = set(self._everyone)
        if self._plan is not None and self._plan.due(summary.epoch):
            self._save_asked = True
        self._start_epoch()

    def _begin_saving(self, plan: CheckpointPlan) -> None:
        self._saving = Saving(plan, self._progress(), self._data(), self._everyone)

    def _progress(self) -> Progress:
        return Progress(
            epoch=self._epoch,
            rounds=self._round - self._epoch_first_round,
            positions=tuple(self._positions),
            reports=tuple(self._reports),
            history=tuple(self._history),
        )

    def _data(self) -> dict[str, Any]:
        return dataclasses.asdict(self._facts())

    def _facts(self) -> DataFacts:
        return DataFacts.of([self._shards[rank] for rank in sorted(self._everyone)])

    def _start_epoch(self) -> None:
        self._active = set(self._everyone)
        self._epoch_started = time.monotonic()
        self._heard = dict.fromkeys(self._everyone, time.monotonic())

    def _wait(self, condition: Callable[[], bool], at_most_s: float = math.inf) -> bool:
        """Wait for a condition, as long as nobody is overdue; returns whether it came true."""
        until = time.monotonic() + at_most_s
        while True:
            now = time.monotonic()
            due = min((self._heard[rank] for rank in self._waited_for()), default=now)
            met = self._condition.wait_for(
                lambda: self.failure is not None or condition(),
                timeout=max(0.01, min(due + self.deadline_s, until) - now),
            )
            self._raise_if_failed()
            if met or time.monotonic() >= until:
                return met
            self.check_deadline()

    def _waited_for(self) -> set[int]:
        if not self._started:
            return set(self._everyone - self._shards.keys())
        if self._gathers:
            return set(self._everyone - self._gathers[min(self._gathers)].keys())
        if self._saving is not None and not self._readers:
            return {rank for rank in self._everyone if self._saving.awaits(rank)}
        return (self._readers or self._active - self._complete) - self._finished

    def _what_is_missing(self, ranks: set[int]) -> str:
        if not ranks <= self._hosts.keys():
            return (
                f"did not start ({len(self._hosts)} of {self.world_size} workers did; all have to "
                "run at once: are other jobs using the cluster?)"
            )
        if not self._started:
            return "did not receive more of its rows"
        if self._gathers:
            return "did not take part in what the workers exchange among themselves"
        if self._saving is not None and not self._readers:
            return f"did not send its own state for the checkpoint before epoch {self._epoch}"
        if self._readers:
            return f"did not take the center of round {self._round}"
        return f"did not contribute to round {self._round + 1} (epoch {self._epoch})"

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")

    def _name(self, ranks: set[int]) -> str:
        hosts = {rank: f" on {host}" for rank, host in self._hosts.items()}
        return ", ".join(f"rank {rank}{hosts.get(rank, '')}" for rank in sorted(ranks))
