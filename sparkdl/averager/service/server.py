"""The averager: a service in the driver that holds the center and runs rounds."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.messages.run_events import RunEvent, TimePassed
from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.averager.service.kept_model import KeptModel
from sparkdl.averager.service.loop import Loop
from sparkdl.averager.service.saving import CheckpointPlan, Resumed, Saving
from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import CenterUpdate, Memory
from sparkdl.averager.values.wire_format import WireFormat
from sparkdl.errors import ConfigError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary, MetricValue
from sparkdl.protocols import Layout
from sparkdl.transport.service import Service


class Averager:
    """Serve rounds to ``world_size`` workers; a context manager that opens and closes the port.

    Args:
        layout: kinds and sizes of the segments of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` per segment; owned from here on.
        world_size: number of workers.
        wire_format: how values travel.
        update: what contributions do to the center; by default their mean replaces it.
        memory: what the update remembers; by default it starts fresh. Owned from here on.
        policy: who is waited for in rounds; by default everyone.
        fragments: how many parts of the state the rounds exchange in turn; 1 for all of it at once.
        host: the interface to bind to, as an address or name of this machine.
        advertised_host: the name under which workers reach it; ``host`` by default.
        deadline_s: the longest for which a worker may be silent while it is waited for, in seconds.
        plan: which commits become checkpoints; none by default.
        resumed: the checkpoint that this process started from, if there was one.
        progress: how far the training of ``center`` has come; by default it is just starting.
        saved: whether a checkpoint holds that progress, if there is any.
        kept: what was kept of each rank at its last commit; by default nothing.
        tolerance: which losses of workers the run survives; none by default.
        tls: whether connections are encrypted.
        frozen: the fingerprint of the parameters that are not part of the center; a worker with
            others ends the run.
        followed: whether callbacks follow the run: ``events`` then yields more, and workers begin
            an epoch only once ``approve_epoch`` has been called for the previous one.
        measures: whether ``events`` yields what metrics counted, and ``measured`` is called with
            their values; such a run is ``followed``.
        metric: the metric that workers want to know for each epoch, instead of the loss.
        kept_model: the copy of the center kept before; by default none.
        now: reads the time, in seconds, by which workers are late.

    Attributes:
        service: accepts the workers' connections, and others if given handlers for them.
        address: the service's address.

    Raises:
        ConfigError: the wire format, or fragments, need workers that stay in step, and the policy
            does not keep them in step; or there are more fragments than values.
    """

    def __init__(
        self,
        layout: Layout,
        center: Sequence[Tensor],
        world_size: int,
        wire_format: WireFormat,
        *,
        update: CenterUpdate | None = None,
        memory: Memory | None = None,
        policy: RoundPolicy | None = None,
        fragments: int = 1,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        deadline_s: float = 600.0,
        plan: CheckpointPlan | None = None,
        resumed: Resumed | None = None,
        progress: Progress | None = None,
        saved: bool = True,
        kept: Mapping[int, WorkerState] | None = None,
        tolerance: Tolerance | None = None,
        tls: bool = False,
        frozen: str = "",
        followed: bool = False,
        measures: bool = False,
        metric: str | None = None,
        kept_model: KeptModel | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = RunSpec(
            world_size=world_size,
            deadline_s=deadline_s,
            tolerance=tolerance or Tolerance(),
            policy=policy or All(),
            checkpoints=plan,
            resumed=resumed is not None,
            frozen=frozen,
            followed=followed,
            measures=measures,
            metric=metric,
        )
        restart = Restart(progress=progress, saved=saved, kept=kept or {})
        self._coordinator = Coordinator(spec, now(), restart)
        if wire_format.replies_changes and policy is not None and not policy.in_step:
            raise ConfigError(
                f"wire format {wire_format.name!r} sends workers only the changes of the center, "
                "which they can apply only if they have received every one; with "
                f"{type(policy).__name__} they have not. Use FullPrecision, or Changes"
            )
        if fragments > 1 and policy is not None and not policy.in_step:
            raise ConfigError(
                f"averaging in {fragments} fragments needs workers that stay in step, but "
                f"{type(policy).__name__} lets them drift apart. Use All, or one fragment"
            )
        largest = max((segment.numel for segment in layout), default=0)
        if fragments > 1 and fragments > largest:
            raise ConfigError(
                f"{fragments} fragments are too many for the model, which has at most {largest} "
                "values of any one kind: use fewer"
            )
        self._plan = plan
        self._center = Center(
            layout,
            center,
            world_size,
            wire_format,
            update,
            memory,
            fragments=fragments,
            rounds=0 if progress is None else progress.all_rounds,
            rounds_of_epoch=0 if progress is None else progress.rounds,
        )
        self._loop = Loop(
            self._coordinator,
            self._center,
            plan,
            resumed,
            kept_model,
            host=host,
            advertised_host=advertised_host,
            encrypted=tls,
            now=now,
        )
        self.service: Service = self._loop
        self.address = self._loop.address

    def __enter__(self) -> Averager:
        return self

    def __exit__(self, *_: object) -> None:
        self.fail(TrainingError("the driver closed the averager"))
        self._loop.close()

    @property
    def center(self) -> list[Tensor]:
        """The current center, a tensor of ``center_dtype`` per segment."""
        return self._center.values

    @property
    def memory(self) -> Memory:
        """What the update of ``center`` remembers."""
        return self._center.memory

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended, including those before a checkpoint."""
        with self._loop.lock:
            return list(self._coordinator.committed.history)

    @property
    def progress(self) -> Progress:
        """How far the training of ``center`` has come."""
        with self._loop.lock:
            return self._coordinator.committed.progress()

    @property
    def kept(self) -> dict[int, WorkerState]:
        """What is kept of each rank, to start it again from ``progress``."""
        with self._loop.lock:
            return dict(self._coordinator.committed.kept)

    @property
    def losses(self) -> list[str]:
        """Which workers have been lost so far, and why."""
        with self._loop.lock:
            return list(self._coordinator.members.losses)

    @property
    def dropped(self) -> list[int]:
        """The ranks of workers dropped for their silence so far, in the order of the drops."""
        with self._loop.lock:
            return list(self._coordinator.members.dropped)

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        return self._coordinator.members.joined > 0

    def postpone_deadline(self) -> None:
        """Restart the time within which workers have to join.

        To be called by whoever starts them and knows that they are about to start.
        """
        self._loop.post_event(on.WorkersExpected())

    def start(self, loss_use: Mapping[str, Any] | None = None) -> None:
        """Let the workers train, if they do not already: their rows' statistics are good.

        Args:
            loss_use: how they use the loss, for them to interpret.
        """
        self._loop.post_event(on.Started(loss_use or {}))

    def approve(self, rank: int) -> None:
        """Let a worker train on rows that arrived while it trains; the answer to ``NewRows``."""
        self._loop.post_event(on.Approved(rank))

    def approve_epoch(self, epoch: int) -> None:
        """Let workers that ask for leave begin the epoch after this one."""
        self._loop.post_event(on.EpochApproved(epoch))

    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> None:
        """Give the values of an epoch's metrics; the answer to ``EpochCounted``."""
        self._loop.post_event(on.EpochMeasured(epoch, values))

    def stop(self, reason: str) -> None:
        """End the run as if it had reached its end; ``center`` is that of the last commit."""
        self._loop.post_event(on.StopWanted(reason))

    def want_commit(self) -> None:
        """Have workers that exchange among themselves commit before the epoch ends.

        They do so at their next gather, within a few seconds. Others commit after each window, and
        are not asked.
        """
        self._loop.post_event(on.CommitWanted())

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run with ``reason`` as soon as a commit has become a checkpoint."""
        self._loop.post_event(on.Preempted(reason))

    @property
    def kept_model(self) -> KeptModel | None:
        """What ``keep_model`` kept last, possibly before a checkpoint."""
        return self._loop.kept_model

    def keep_model(self, epoch: int) -> None:
        """Keep a copy of the center, in memory and in the checkpoints that follow.

        To be called before ``approve_epoch``, while workers wait and the center does not change.

        Args:
            epoch: the epoch that has just ended.
        """
        self._loop.kept_model = KeptModel(epoch, self._center.model())

    @property
    def saved(self) -> bool:
        """Whether a checkpoint holds everything committed, if any are planned."""
        with self._loop.lock:
            return self._coordinator.checkpoints.has_last_commit

    def save_center(self) -> bool:
        """After the end, write a checkpoint if the last one lacks the last commit or kept model.

        Writes nothing if nothing was committed. The workers' states are included if they were
        already saved with that commit.

        Returns:
            Whether there is one now, or there is nothing to save.
        """
        self._loop.join_writer()
        with self._loop.lock:
            # Nothing more is committed, so the center does not change.
            assert self._coordinator.ended
            is_saved = self._coordinator.checkpoints.has_last_commit
            kept = self.kept_model
            if self._plan is None or (is_saved and (kept is None or kept.saved)):
                return True
            data = self._coordinator.shards.statistics.lasting()
            progress = self._coordinator.committed.progress()
            center = self._center.named()
            saving = Saving(self._plan, progress, data, center, kept, goes_on=False)
        if is_saved:
            saving.take_over_worker_states()
        saving.publish()
        return not saving.failed

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self._loop.post_event(on.Failed(error))

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
                events = self._loop.reports.get(timeout=min(1.0, look_s))
            except queue.Empty:
                continue
            if events is not None:
                yield from events
            elif failure := self._coordinator.failure or self._loop.cut_short:
                raise failure
            else:
                return
