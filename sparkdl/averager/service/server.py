"""The averager: a service in the driver that holds the center and runs rounds."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.messages.run_events import RunEvent, TimePassed
from sparkdl.averager.service.loop import EdgeOptions, Loop
from sparkdl.averager.service.saving import CheckpointFiles, Saving
from sparkdl.averager.service.snapshot import KeptModel, Snapshot
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.errors import ConfigError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary, MetricValue
from sparkdl.transport.service import Service


@dataclass(frozen=True, kw_only=True)
class AveragerSpec:
    """What is settled about an averager before it begins.

    Attributes:
        run: how the run is planned; its ``checkpoints`` and ``resumed`` follow from ``files``.
        center: how the center is laid out, travels and changes.
        files: the checkpoints that the run reads and writes; by default none.
    """

    run: RunSpec
    center: CenterSpec
    files: CheckpointFiles = field(default_factory=CheckpointFiles)


class Averager:
    """Serve rounds to ``world_size`` workers; a context manager that opens and closes the port.

    Args:
        spec: what is settled about it.
        snapshot: the initial center, and how far its training has come.
        edge: where the averager listens, and its clock.

    Attributes:
        service: accepts the workers' connections, and others if given handlers for them.
        address: the service's address.

    Raises:
        ConfigError: the wire format, or fragments, need workers that stay in step, and the policy
            does not keep them in step; or there are more fragments than values.
    """

    def __init__(
        self,
        spec: AveragerSpec,
        snapshot: Snapshot,
        edge: EdgeOptions = EdgeOptions(),  # noqa: B008
    ) -> None:
        center, files = spec.center, spec.files
        run = replace(spec.run, checkpoints=files.plan, resumed=files.resumed is not None)
        self._coordinator = Coordinator(run, edge.now(), snapshot.restart)
        policy, wire_format, fragments = run.policy, center.wire_format, center.fragments
        if wire_format.replies_changes and not policy.in_step:
            raise ConfigError(
                f"wire format {wire_format.name!r} sends workers only the changes of the center, "
                "which they can apply only if they have received every one; with "
                f"{type(policy).__name__} they have not. Use FullPrecision, or Changes"
            )
        if fragments > 1 and not policy.in_step:
            raise ConfigError(
                f"averaging in {fragments} fragments needs workers that stay in step, but "
                f"{type(policy).__name__} lets them drift apart. Use All, or one fragment"
            )
        largest = max((segment.numel for segment in center.layout), default=0)
        if fragments > 1 and fragments > largest:
            raise ConfigError(
                f"{fragments} fragments are too many for the model, which has at most {largest} "
                "values of any one kind: use fewer"
            )
        self._plan = files.plan
        progress = snapshot.restart.progress
        self._center = Center(
            center.layout,
            snapshot.center,
            run.world_size,
            wire_format,
            center.update,
            snapshot.memory,
            fragments=fragments,
            rounds=0 if progress is None else progress.all_rounds,
            rounds_of_epoch=0 if progress is None else progress.rounds,
        )
        self._loop = Loop(self._coordinator, self._center, files, snapshot.kept_model, edge)
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
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended, including those before a checkpoint."""
        with self._loop.lock:
            return list(self._coordinator.committed.history)

    @property
    def progress(self) -> Progress:
        """How far the training of ``center`` has come."""
        with self._loop.lock:
            return self._coordinator.committed.progress()

    def snapshot(self) -> Snapshot:
        """What another averager needs to go on after the last commit, once this one is closed."""
        with self._loop.lock:
            restart = self._coordinator.restart()
        return Snapshot(
            center=self._center.values,
            memory=self._center.memory,
            restart=restart,
            kept_model=self.kept_model,
        )

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
