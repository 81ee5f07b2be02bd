"""The averager: a service in the driver that holds the center and runs rounds.

In its thread bytes become events, and decisions bytes. Values go from the socket straight into the
memory where they are summed; slow work (files of checkpoints) is done in other threads. The clock
is checked only after the sockets.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from typing import Any

from sparkdl.averager.coordination.actions import Decision, Event, P
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.headers import stopped_header
from sparkdl.averager.run_events import Progress, RunEvent, TimePassed, WorkerLost
from sparkdl.averager.service.conversation import Worker
from sparkdl.averager.service.saving import CheckpointPlan, KeptModel, Saving, Snapshot
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import CheckpointError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary, MetricValue
from sparkdl.feed.shards import DataStatistics
from sparkdl.transport.framing import header_message
from sparkdl.transport.service import Service

CLOSE_S = 10.0
"""Seconds to wait at the end for a checkpoint that is being written."""


@dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """Where a run meets the world: its port and its clock.

    Attributes:
        host: the interface to bind to, as an address or name of this machine.
        advertised_host: the name under which workers reach it; ``host`` by default.
        ports: first and last port to try; None for any free one.
        tls: whether connections are encrypted.
        now: reads the time, in seconds, by which workers are late.
    """

    host: str = "127.0.0.1"
    advertised_host: str | None = None
    ports: tuple[int, int] | None = None
    tls: bool = False
    now: Callable[[], float] = time.monotonic


class Averager(Service):
    """Serve rounds to the workers of a run; a context manager that opens and closes the port.

    It may also serve others than workers in their rounds, if given handlers for them.

    Args:
        spec: how the run is planned.
        center: how its center is laid out, travels and changes.
        snapshot: the initial center, and how far its training has come.
        edge: where it listens, and its clock.

    Attributes:
        coordinator: makes the decisions; only the service's thread gives it events.
        center: what the decisions are about.
        resumed: the checkpoint that this process started from, if there was one.
        kept_model: what ``keep_model`` kept last, possibly before a checkpoint; part of each
            checkpoint begun from then on.
        saving: the checkpoint being put together.
        by_member: the worker that decisions about a member concern.
        await_turn: by rank, the worker that is woken once it is its turn to add a chunk, and which.
        lock: held while the coordinator decides; to be taken by whoever reads its state.

    Raises:
        ConfigError: the wire format, or fragments, need workers that stay in step, and the policy
            does not keep them in step; or there are more fragments than values.
    """

    def __init__(
        self,
        spec: RunSpec,
        center: CenterSpec,
        snapshot: Snapshot,
        edge: EdgeOptions = EdgeOptions(),
    ) -> None:
        center.require_in_step(type(spec.policy).__name__, in_step=spec.policy.in_step)
        progress = snapshot.restart.progress
        self.coordinator = Coordinator(spec, edge.now(), snapshot.restart)
        self.center = Center(
            center,
            snapshot.center,
            spec.world_size,
            snapshot.memory,
            rounds=0 if progress is None else progress.all_rounds,
            rounds_of_epoch=0 if progress is None else progress.rounds,
        )
        self.resumed = snapshot.resumed
        self.kept_model = snapshot.kept_model
        self.saving: Saving | None = None
        self.lock = threading.RLock()
        # What the driver is told, some events at a time; None once the run has ended.
        self._reports: queue.SimpleQueue[tuple[RunEvent, ...] | None] = queue.SimpleQueue()
        self._unreported: list[RunEvent] = []
        self.by_member: dict[Member, Worker] = {}
        self.await_turn: dict[int, tuple[Worker, int]] = {}
        self._events: deque[tuple[Callable[..., list[Decision]], Any, Any]] = deque()
        self._wakes: deque[Worker] = deque()
        self._writer: threading.Thread | None = None
        self._end_reported = False
        super().__init__(
            edge.host,
            {"join": lambda channel: Worker(channel, self)},
            advertised_host=edge.advertised_host,
            encrypted=edge.tls,
            ports=edge.ports,
            name="sparkdl-averager",
            now=edge.now,
        )
        self.on_break(self._broke)

    def __exit__(self, *_: object) -> None:
        self.fail(TrainingError("the driver closed the averager"))
        self.close()

    # For the driver's threads.

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.coordinator.spec.world_size

    @property
    def there(self) -> set[int]:
        """The ranks that have joined and are not lost."""
        with self.lock:
            return self.coordinator.members.there

    @property
    def progress(self) -> Progress:
        """How far the training of ``center`` has come."""
        with self.lock:
            return self.coordinator.committed.progress()

    @property
    def epochs_known(self) -> int:
        """How many epochs' losses are final: ``events`` has told of these epochs, or will."""
        with self.lock:
            return self.coordinator.epoch_losses.known

    def snapshot(self) -> Snapshot:
        """What another averager needs to go on after the last commit, once this one is closed."""
        with self.lock:
            restart = self.coordinator.restart()
        return Snapshot(
            center=self.center.values,
            memory=self.center.memory,
            restart=restart,
            kept_model=self.kept_model,
            resumed=self.resumed,
        )

    @property
    def told_to_end(self) -> SparkDLError | None:
        """Why the run has to end once a commit has become a checkpoint; None if it has not."""
        return self.coordinator.checkpoints.told_to_end

    @property
    def losses(self) -> list[str]:
        """Which workers have been lost so far, and why."""
        with self.lock:
            return list(self.coordinator.members.losses)

    @property
    def dropped(self) -> list[int]:
        """The ranks of workers dropped for their silence so far, in the order of the drops."""
        with self.lock:
            return list(self.coordinator.members.dropped)

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        return bool(self.coordinator.members.joined)

    @cached_property
    def parts(self) -> memoryview:
        """The message that says how many rows all ranks have of which partitions, for all of them.

        With thousands of partitions, encoding it for each would hold up the others.
        """
        return memoryview(header_message({"parts": self.coordinator.shards.statistics.parts}))

    def postpone_deadline(self) -> None:
        """Restart the time within which workers have to join.

        To be called by whoever starts them and knows that they are about to start.
        """
        self.post_event(self.coordinator.expect_workers)

    def start(self, loss_use: str = "") -> None:
        """Let the workers train, if they do not already: their rows' statistics are good.

        Args:
            loss_use: how they use the loss, for them to interpret.
        """
        self.post_event(self.coordinator.start, loss_use)

    def approve_epoch(self, epoch: int) -> None:
        """Let workers that ask for leave begin the epoch after this one."""
        self.post_event(self.coordinator.approve_epoch, epoch)

    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> None:
        """Give the values of an epoch's metrics; the answer to ``EpochCounted``."""
        self.post_event(self.coordinator.measured, epoch, values)

    def stop(self, reason: str) -> None:
        """End the run as if it had reached its end; ``center`` is that of the last commit."""
        self.post_event(self.coordinator.stop, reason)

    def want_commit(self) -> None:
        """Have workers that exchange among themselves commit before the epoch ends.

        They do so at their next gather, within a few seconds. Others commit after each window, and
        are not asked.
        """
        self.post_event(self.coordinator.want_commit)

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run with ``reason`` as soon as a commit has become a checkpoint."""
        self.post_event(self.coordinator.preempt, reason)

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self.post_event(self.coordinator.fail, error)

    def post_event(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Have the coordinator decide on an event."""
        self.post(partial(self.tell, event, *arguments, **options))

    def keep_model(self, epoch: int) -> None:
        """Keep a copy of the center, in memory and in the checkpoints that follow.

        To be called before ``approve_epoch``, while workers wait and the center does not change.

        Args:
            epoch: the epoch that has just ended.
        """
        self.kept_model = KeptModel(epoch, self.center.model())

    def save_center(self) -> bool:
        """After the end, write a checkpoint if the last one lacks the last commit or kept model.

        Writes nothing if nothing was committed. The workers' states are included if they were
        already saved with that commit.

        Returns:
            Whether there is one now, or there is nothing to save.
        """
        self._join_writer()
        with self.lock:
            # Nothing more is committed, so the center does not change.
            assert self.coordinator.ended
            plan, kept = self.coordinator.spec.checkpoints, self.kept_model
            is_saved = self.coordinator.checkpoints.has_last_commit
            if plan is None or (is_saved and (kept is None or kept.saved)):
                return True
            assert isinstance(plan, CheckpointPlan)
            data = self.coordinator.shards.statistics.lasting()
            progress = self.coordinator.committed.progress()
            saving = Saving(plan, progress, data, self.center.named(), kept, goes_on=False)
        if is_saved:
            saving.take_over_worker_states()
        saving.publish()
        return not saving.failed

    def events(self, *, look_s: float = math.inf) -> Iterator[RunEvent]:
        """Yield reports: the data's statistics, then what happens until all have finished.

        The workers train only after ``start``, which has to follow the statistics.

        Args:
            look_s: about how often to yield ``TimePassed`` in between, in seconds; by default
                never.

        Raises:
            WorkerError: the user's code raised on a worker.
            WorkerLostError: a worker's connection broke.
            CollectiveError: the exchange among the workers broke.
            DeadlineError: a worker that was waited for was silent for ``deadline_s``.
            TrainingError: a bug has ended the averager's own thread.
        """
        next_look = time.monotonic() + look_s
        while True:
            # Even if there is always something else to report.
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + look_s
                yield TimePassed()
            try:
                events = self._reports.get(timeout=min(1.0, look_s))
            except queue.Empty:
                continue
            if events is not None:
                yield from events
            elif self.coordinator.failure is not None:
                raise self.coordinator.failure
            else:
                return

    def close(self) -> None:
        """End every connection, and wait a little for a checkpoint that is being written."""
        super().close()
        self._join_writer()
        for event, arguments, options in list(self._events):  # too late for the thread
            if event.__name__ == "checkpoint_ended":
                self._decide(event, *arguments, **options)
        if self.saving is not None and not (self._writer and self._writer.is_alive()):
            self.saving.failed = True  # it is waiting for workers that have left

    def _join_writer(self) -> None:
        """Wait a little for a checkpoint that is being written."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)

    # For conversations.

    def tell(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Have the coordinator decide on an event, once the present conversation has paused."""
        self._events.append((event, arguments, options))

    def pass_turn(self, index: int) -> None:
        """Wake whoever waits to add a chunk, if it is its turn now."""
        total = self.center.sum
        rank = None if total is None else total.turn(index)
        if rank is not None and rank in self.await_turn and self.await_turn[rank][1] == index:
            self._wakes.append(self.await_turn.pop(rank)[0])

    # The service's thread.

    def follow_up(self) -> bool:
        """Wake workers whose turn has come, and decide on what has happened."""
        if not (self._wakes or self._events):
            self._publish()  # workers have been sent their replies, so they need not wait for it
            return False
        while self._wakes or self._events:
            if self._wakes:
                channel = self._wakes.popleft().channel
                self.guard(channel, channel.wake)
            else:
                event, arguments, options = self._events.popleft()
                self._decide(event, *arguments, **options)
        return True

    def tick(self) -> float:
        """Have the coordinator check the time."""
        self.tell(self.coordinator.tick)
        if self.coordinator.ended:  # whoever is still silent then would otherwise not hear of it
            for channel in [each for each, session in self._sessions.items() if session is None]:
                self.part(channel, stopped_header(self.coordinator.farewell))
        return self.coordinator.members.tick_s

    def _broke(self, failure: TrainingError) -> None:
        """End the run, even if the bug is in the decisions."""
        try:
            self._decide(self.coordinator.fail, failure)
        finally:
            if not self._end_reported:
                self.coordinator.failure = self.coordinator.failure or failure
                self._report_end()

    def _decide(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        if event.__name__ == "checkpoint_ended":
            self.saving = None
        with self.lock:
            for decision in event(self.now(), *arguments, **options):
                self._carry_out(*decision)

    def _publish(self) -> None:
        """Hand the driver's thread what it is told, which takes turns at Python's lock."""
        if self._unreported:
            self._reports.put(tuple(self._unreported))
            self._unreported = []

    def _report_end(self) -> None:
        self._end_reported = True
        self._publish()
        self._reports.put(None)

    # Decisions, carried out; ``Actions`` says what each means.

    def _carry_out(self, action: str, arguments: Any, options: Any) -> None:
        if hasattr(self, action):
            getattr(self, action)(*arguments, **options)
        else:  # for a worker's connection to do, if there still is one
            member, *others = arguments
            self._do(member, methodcaller(action, *others, **options))

    def _do(self, member: Member, act: Callable[[Worker], object]) -> None:
        worker = self.by_member.get(member)
        if worker is not None:
            self.guard(worker.channel, lambda: act(worker))

    def _send_all(self, members: tuple[Member, ...], fields: dict[str, Any]) -> None:
        message = memoryview(header_message(fields))
        for member in members:
            self._do(member, lambda worker: worker.channel.send([message]))

    def send_gathered(
        self, members: tuple[Member, ...], gathered: tuple[object, ...], *, commit: bool
    ) -> None:
        """Send workers what all gave."""
        self._send_all(members, {"gathered": list(gathered), "commit": commit})

    def start_over(self, members: tuple[Member, ...]) -> None:
        """Forget the sum, and wake whoever waited for a turn to add to it."""
        self.center.sum = None
        waiting, self.await_turn = self.await_turn, {}
        for member in members:
            self._do(member, Worker.start_over)
        self._wakes.extend(worker for worker, _ in waiting.values())

    def say_waiting(self, members: tuple[Member, ...]) -> None:
        """Tell workers that the run goes on."""
        self._send_all(members, {"waiting": True})

    def drop(self, member: Member, why: str) -> None:
        """End a worker's connection at once."""
        self._do(member, lambda worker: self.close_channel(worker.channel))
        if not self.coordinator.spec.followed:  # otherwise the coordinator reports it
            self.report(WorkerLost(member.rank, why))

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Begin a sum."""
        self.center.open_sum(ranks)

    def skip(self, rank: int) -> None:
        """Go on without a rank, waking whoever waited for its turn to end."""
        assert self.center.sum is not None
        self.center.sum.declare(rank, 0)
        for _, index in list(self.await_turn.values()):
            self.pass_turn(index)

    def commit(self, contributions: Contributions) -> None:
        """Let the sum change the center."""
        self.center.commit(contributions)

    def begin_checkpoint(self, progress: Progress, statistics: DataStatistics) -> None:
        """Copy the center for a checkpoint."""
        plan = self.coordinator.spec.checkpoints
        assert isinstance(plan, CheckpointPlan)
        data = statistics.lasting()
        self.saving = Saving(plan, progress, data, self.center.copy(), self.kept_model)

    def write_checkpoint(self) -> None:
        """Write the checkpoint in a thread of its own."""
        saving = self.saving
        assert saving is not None

        def write() -> None:
            try:
                saving.publish()
            except Exception as error:  # a bug of ours must not leave the workers waiting
                failure = CheckpointError(f"the thread that writes checkpoints: {error!r}")
                self.post_event(self.coordinator.fail, failure)
                raise
            self.post_event(self.coordinator.checkpoint_ended, saved=not saving.failed)

        self._writer = threading.Thread(target=write, name="sparkdl-saving", daemon=True)
        self._writer.start()

    def report(self, event: RunEvent) -> None:
        """Tell the driver of something, soon."""
        if isinstance(event, EpochSummary):
            self.center.start_epoch()
        self._unreported.append(event)

    def end(self, failure: SparkDLError | None, stopped: str | None) -> None:
        """Tell workers and driver that the run is over."""
        if failure is not None or stopped is not None:
            self.await_turn.clear()
            farewell = stopped_header(self.coordinator.farewell)
            for session in list(self._sessions.values()):
                if isinstance(session, Worker):
                    self.part(session.channel, farewell)
        self._report_end()
