"""Who takes part in a run: joining, reading, starting, being lost, coming back, being waited for.

    join:       every rank, as soon as it runs, and again whenever it comes back
    ready:      every rank, once it has read its rows; returns when all have and the driver, who is
                told what they found, has let them start; for one that comes back, as soon as the
                next round can begin with it
    show:       a rank that was let start with the first of its rows, when it has found in others
                what the driver may refuse, and once it has read all; returns when it does not
    gather:     every rank, equally often, at any time after it was let start

Every method is called from the thread that serves one worker, as the member that this worker has
joined as: whose place was taken meanwhile can do nothing in the name of its successor. A failure
ends the run: it is raised in every thread that waits here, and in the driver's.

A rank is overdue when someone waits for it and nothing was heard of it for longer than it is
granted. Whoever waits notices, and so does the driver's thread; both look at regular intervals.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.averager.members import Member, Members, Tolerance
from sparkdl.averager.shards import Shards
from sparkdl.errors import DeadlineError, SparkDLError, StoppedError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.facts import DataFacts, ShardFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewRows:
    """What a worker has found in rows that arrive while it trains; it waits for ``approve``.

    Attributes:
        rank: the worker's.
        shard: what is known of its rows by now.
    """

    rank: int
    shard: ShardFacts


Event = DataFacts | NewRows | WindowReport | EpochSummary


class Attendance(ABC):
    """The workers of a run and one lock for all that they share; ``Rounds`` is what they do there.

    Args:
        world_size: number of workers.
        deadline_s: the longest that a rank may be silent while it is waited for, in seconds.
        tolerance: what losses the run survives.

    Attributes:
        world_size: as given.
        deadline_s: as given.
        events: what the driver is told; None when the run has ended.
        failure: what ended it, if it failed.
    """

    def __init__(self, world_size: int, deadline_s: float, tolerance: Tolerance) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.failure: SparkDLError | None = None
        self._condition = threading.Condition()
        self._members = Members(world_size, deadline_s, tolerance)
        self._everyone = self._members.everyone
        self._shards = Shards(world_size)
        # Who waits for the driver to look at rows.
        self._shown: set[int] = set()
        self._gathers: dict[int, dict[int, object]] = {}
        self._gathered = dict.fromkeys(self._everyone, 0)
        self._started = False
        self._told_to_end: SparkDLError | None = None
        # Not yet through with the epoch; let in; back, and waiting to be let in.
        self._pending: set[int] = set()
        self._admitted: set[int] = set()
        self._knocking: set[int] = set()
        # Who waits for no other worker, and so is not late.
        self._held: set[int] = set()
        # Who has yet to take the center, and who has left for good.
        self._readers: set[int] = set()
        self._finished: set[int] = set()

    def join(
        self,
        rank: int,
        host: str,
        attempt: int = 0,
        task: int | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> Member:
        """Enter the run, for the first time or again.

        Args:
            rank: the worker's rank.
            host: where it runs, for messages.
            attempt: of its task.
            task: the number of its task; None for a task of its own.
            interrupt: ends its connection; called when it is dropped.

        Raises:
            TrainingError: the rank is not one of this run's, or has joined already.
            FencedError: a later attempt of the task has joined.
        """
        with self._condition:
            self._raise_if_failed()
            member = Member(rank, host, attempt, interrupt, rank if task is None else task)
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

    def still_reading(self, member: Member) -> None:
        """Take note that a worker is alive and reads its rows.

        Raises:
            StoppedError: the run failed elsewhere, so that the worker need not go on.
        """
        with self._condition:
            self._require(member)
            self.hear(member.rank)

    def ready(self, member: Member, shard: ShardFacts, on_wait: Callable[[], None]) -> None:
        """Say that a worker has read its rows, and wait until it may take the center.

        Args:
            member: the worker.
            shard: what it found.
            on_wait: called now and then while others still read.

        Raises:
            DataError: the worker has come back, and its rows are not what they were.
            DeadlineError: a rank did not start, or was silent while it read.
            StoppedError: the driver refused the data, or the run failed elsewhere.
        """
        rank = member.rank
        with self._condition:
            self._require(member)
            self._note_shard(rank, shard)
            self._members.note_reading(rank, reading=not shard.complete)
            if self._started and rank not in self._admitted:
                self._knocking.add(rank)
                self._on_return()
        while True:
            with self._condition:
                if self._wait(
                    lambda: rank in self._admitted, member, at_most_s=self.deadline_s / 4
                ):
                    return
            on_wait()

    def show(self, member: Member, shard: ShardFacts, on_wait: Callable[[], None]) -> None:
        """Have the driver look at rows that arrived after the worker was let start.

        Args:
            member: the worker.
            shard: what it has found by now.
            on_wait: called now and then meanwhile.

        Raises:
            TrainingError: the worker has read its rows already.
            StoppedError: the driver refused them, or the run failed elsewhere.
        """
        rank = member.rank
        with self._condition:
            self._require(member)
            self.hear(rank)
            if not self._members.reads(rank):
                raise TrainingError(f"rank {rank} said a second time what its rows are")
            self._note_shard(rank, shard)
            self._members.note_reading(rank, reading=not shard.complete)
            self._shown.add(rank)
            self.events.put(NewRows(rank, shard))
        while True:
            with self._condition:
                if self._wait(
                    lambda: rank not in self._shown, member, at_most_s=self.deadline_s / 4
                ):
                    return
            on_wait()

    def approve(self, rank: int) -> None:
        """Let a rank go on; called by the driver once it has looked at its new rows."""
        with self._condition:
            self._shown.discard(rank)
            self.hear(rank)
            self._condition.notify_all()

    def gather(self, member: Member, value: object, on_wait: Callable[[], None]) -> list[object]:
        """Wait until every rank has called this as often as this one; returns all values by rank.

        Args:
            member: the worker.
            value: what the others are to know.
            on_wait: called now and then while others are still to come.

        Raises:
            DeadlineError: a rank stayed away.
            StoppedError: the run failed elsewhere.
            TrainingError: a rank has left for good.
        """
        rank = member.rank
        with self._condition:
            self._require(member)
            self._require_everyone(rank, "takes part in what the workers exchange among themselves")
            self.hear(rank)
            number = self._gathered[rank]
            self._gathered[rank] += 1
            values = self._gathers.setdefault(number, {})
            values[rank] = value
            if len(values) == self.world_size:
                del self._gathers[number]
                self._members.hear(self._everyone)
                self._condition.notify_all()
        while True:
            with self._condition:
                if self._wait(
                    lambda: len(values) == self.world_size, member, at_most_s=self.deadline_s / 4
                ):
                    return [values[other] for other in sorted(self._everyone)]
            on_wait()

    def start(self) -> None:
        """Let the workers train, if they do not; called by the driver that has seen the facts."""
        with self._condition:
            if self._started:
                return
            self._started = True
            self._admitted = self._members.there & self._shards.ranks
            self._await_everyone()
            self._on_start()
            self._condition.notify_all()

    @property
    def mean_weight(self) -> float:
        """Of the rows of all ranks; known once all have read theirs."""
        with self._condition:
            return self._shards.facts.mean_weight

    @property
    def shard_rows(self) -> list[int]:
        """Rows to train on by rank; known once all have read theirs."""
        with self._condition:
            return list(self._shards.facts.shard_rows)

    @property
    def losses(self) -> list[str]:
        """Which workers were lost, and why."""
        with self._condition:
            return list(self._members.losses)

    @property
    def dropped(self) -> list[int]:
        """The rank of each worker that was dropped for its silence, in that order."""
        with self._condition:
            return list(self._members.dropped)

    @property
    def look_s(self) -> float:
        """How often ``check_deadline`` has to be called, in seconds between two calls."""
        return self._members.look_s

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        with self._condition:
            return bool(self._members.joined)

    def postpone_deadline(self) -> None:
        """Take note that what workers wait for before they can start makes progress."""
        with self._condition:
            self._members.hear(self._everyone - self._members.joined)

    def hear(self, rank: int) -> None:
        """Take note that a rank is alive: something of it arrived, or it took something."""
        self._members.hear([rank])

    def finish(self, member: Member) -> None:
        """Leave the run for good, after the last epoch."""
        with self._condition:
            # Also of who was dropped just now: it will not come back, for its work is done.
            self._finished.add(member.rank)
            if len(self._finished) == self.world_size:
                self.events.put(None)

    def fail(self, error: SparkDLError) -> None:
        """End the run; later failures are consequences of the first and are dropped."""
        with self._condition:
            if self.failure is None and len(self._finished) < self.world_size:
                # Who was told to end may see the workers end too.
                self.failure = self._told_to_end or error
                self._on_failure()
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
            self._members.look()
            self._check_saving()
            silent = self._members.overdue(self._waited_for())
            present = silent & self._members.there
            if present and self._members.tolerance.max_failures and self._started:
                for rank in sorted(present):
                    patience = self._members.patience_s(rank)
                    what = self._what_is_missing({rank})
                    self._members.dropped.append(rank)
                    self._lose(self._members.of(rank), f"{what} within {patience:.1f} s")
                self._members.double_patience()
            elif silent:
                late = (silent - self._members.joined) or silent
                raise DeadlineError(
                    f"{self._members.name(late)} {self._what_is_missing(late)} within "
                    f"{self.deadline_s:g} s. If it takes longer here, raise the estimator's "
                    "'timeout'"
                )

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
        self._on_loss(rank)
        # Who waited for the lost one could not be heard of.
        self._members.hear(self._admitted)
        self._condition.notify_all()

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

    def _await_everyone(self) -> None:
        """From here on everyone is expected to train on an epoch's rows."""
        self._pending = set(self._everyone)
        self._members.hear(self._everyone)

    def _note_shard(self, rank: int, shard: ShardFacts) -> None:
        news = self._shards.note(rank, shard)
        if news is not None:
            self.events.put(news)

    def _wait(
        self, condition: Callable[[], bool], member: Member, at_most_s: float = math.inf
    ) -> bool:
        """Wait for a condition, as long as nobody is overdue; returns whether it came true."""
        until = time.monotonic() + at_most_s
        while True:
            due = self._members.next_due(self._waited_for())
            left = min(due, until) - time.monotonic()
            met = self._condition.wait_for(
                lambda: self.failure is not None or member.gone or condition(),
                timeout=max(0.01, min(left, self._members.look_s)),
            )
            self._members.look()
            self._require(member)
            if met or time.monotonic() >= until:
                return met
            self.check_deadline()

    def _waited_for(self) -> set[int]:
        if not self._started:
            return set(self._everyone - self._shards.ranks)
        if self._gathers:
            return set(self._everyone - self._gathers[min(self._gathers)].keys())
        return self._waited_for_in_round() - self._finished

    def _what_is_missing(self, ranks: set[int]) -> str:
        joined = self._members.joined
        if not ranks <= joined:
            return (
                f"did not start ({len(joined)} of {self.world_size} workers did; all have to "
                "run at once: are other jobs using the cluster? An executor that cannot reach the "
                "driver says so in its log)"
            )
        if not ranks & self._members.there:
            reasons = "; ".join(self._members.last_loss(rank) for rank in sorted(ranks))
            return f"did not come back ({reasons}; is there a slot to start it again?)"
        if not self._started:
            return "did not receive more of its rows"
        if self._gathers:
            return "did not take part in what the workers exchange among themselves"
        return self._what_the_round_misses()

    def _require(self, member: Member) -> None:
        """Check that the run goes on, and that a worker is still the one of its rank.

        Raises:
            StoppedError: the run failed elsewhere.
            FencedError: the worker was lost, dropped or replaced.
        """
        self._raise_if_failed()
        self._members.require(member)

    def _require_everyone(self, rank: int, what: str) -> None:
        """Check that nobody has left for good whom a rank would wait for.

        Raises:
            TrainingError: somebody has.
        """
        if self._finished:
            raise TrainingError(
                f"{self._members.name([rank])} {what}, but {self._members.name(self._finished)} "
                "left the run before: each worker has to train as many epochs as the others"
            )

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")

    @abstractmethod
    def _on_start(self) -> None:
        """All are let start."""

    @abstractmethod
    def _on_return(self) -> None:
        """A worker that was lost has read its rows again, and wants to be let in."""

    @abstractmethod
    def _on_loss(self, rank: int) -> None:
        """A worker is lost, and training goes on."""

    @abstractmethod
    def _on_failure(self) -> None:
        """The run ends."""

    @abstractmethod
    def _waited_for_in_round(self) -> set[int]:
        """Who is waited for, once all have started."""

    @abstractmethod
    def _what_the_round_misses(self) -> str:
        """What those are waited for; follows their names."""

    @abstractmethod
    def _check_saving(self) -> None:
        """Raise ``DeadlineError`` if a checkpoint takes too long."""
