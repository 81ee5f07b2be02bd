"""When a run changes its number of workers, and from where it goes on.

Each averager has one number of workers. So all of them start again for another one: at an epoch's
end with those that could be added, or from the epoch's start without those that do not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from sparkdl.averager.coordination.run_state import Restart
from sparkdl.averager.run_events import IN_MEMORY_BYTES, WorkerState
from sparkdl.averager.service.saving import ResumedCheckpoint, Snapshot
from sparkdl.averager.service.server import Averager
from sparkdl.errors import ConfigError
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds in which a lost worker usually comes back where it was."""
AWAY_S = 60.0
"""Seconds after which the others go on without a worker that has not come back."""


class Slots(Protocol):
    """Where workers could be added."""

    @property
    def free(self) -> int:
        """How many workers could start now."""

    @property
    def ranks_a_task(self) -> int:
        """How many workers can only start together."""

    def give(self) -> None:
        """Let a worker that was lost have one of the free slots."""


class Resize:
    """The changes of one run's number of workers.

    Args:
        job: what is trained; it says between which numbers.
        slots: tells where workers could be added.

    Attributes:
        losses: how many workers were lost before the last change.
    """

    def __init__(self, job: Job, slots: Slots) -> None:
        assert job.max_workers is not None
        self.losses = 0
        self._fewest, self._most, self._epochs = job.min_workers, job.max_workers, job.epochs
        self._slots = slots
        self._begun: Snapshot | None = None
        self._next: Snapshot | None = None
        # Since when each rank is missing, and which of these were given a free slot.
        self._away: dict[int, float] = {}
        self._given: set[int] = set()

    def resumed(
        self, snapshot: Snapshot, checkpoint: ResumedCheckpoint, world_size: int
    ) -> Snapshot:
        """Deal a checkpoint to another number of workers, if it was written at an epoch's end.

        Args:
            snapshot: of the checkpoint.
            checkpoint: from which the training resumes.
            world_size: number of workers that there are.

        Returns:
            The snapshot for that number; as it is if it was written in the middle of an epoch.

        Raises:
            ConfigError: more workers than are allowed now have begun the epoch.
        """
        progress = checkpoint.progress
        before = len(progress.positions)
        if before == world_size:
            return snapshot
        if progress.rounds:
            if before > self._most:
                raise ConfigError(
                    f"{checkpoint.saved.path} is from the middle of an epoch that {before} workers "
                    f"began, and only as many can end it, but maxWorkers is {self._most}. Set it "
                    f"to {before} or more"
                )
            logger.info("%d workers go on until the epoch ends, as it was begun", before)
            return snapshot
        kept, pieces = dict[int, WorkerState](), map(checkpoint.worker_state, range(before))
        piece = next(filter(None, pieces), None)  # the first may have been lost meanwhile
        if piece is not None:
            kept[0] = WorkerState()
            for block in piece.blocks(IN_MEMORY_BYTES):
                kept[0].add(block)
        restart = Restart(progress=progress, kept=kept)
        return replace(snapshot, restart=restart).resized(world_size)

    @property
    def is_due(self) -> bool:
        """Whether another averager is to go on."""
        return self._next is not None

    def begin(self, averager: Averager) -> None:
        """Keep the start of the epoch that an averager is about to serve, unless that is known."""
        self._away, self._given = {}, set()
        self._keep(averager.snapshot())

    def take(self) -> Snapshot | None:
        """From where to go on with another number of workers; None if nothing changes."""
        found, self._next = self._next, None
        return found

    def epoch_ended(self, averager: Averager, epoch: int) -> str | None:
        """Decide once an epoch's loss is known; returns why the averager has to end, if it has."""
        snapshot, before = averager.snapshot(), averager.world_size
        snapshot = replace(snapshot, restart=replace(snapshot.restart, validated=True))
        if epoch < self._epochs:
            after = min(self._most, len(averager.there) + self._slots.free)
            if after > before:
                return self._change(averager, snapshot, after)
        # Of the last epoch too: if someone is lost after it, nothing is left to train.
        self._keep(snapshot)
        return None

    def look(self, averager: Averager) -> str | None:
        """Decide at any other time; returns why the averager has to end, if it has."""
        now, there = averager.now(), averager.there
        if self.is_due or not there:  # nobody has started yet, or all have left
            return None
        missing = set(range(averager.world_size)) - there
        self._away = {rank: self._away.get(rank, now) for rank in missing}
        self._given &= missing
        for rank in self._since(now - RETRY_S) - self._given:
            self._given.add(rank)
            if self._slots.free:
                self._slots.give()
        together = self._slots.ranks_a_task
        left = len(there) // together * together
        if self._begun is None or not self._since(now - AWAY_S):
            return None
        assert self._begun.restart.progress is not None
        begun, known = self._begun.restart.progress.epoch, averager.epochs_known
        if begun > self._epochs and known >= self._epochs:
            return f"{_named(self._away)} did not come back after the last epoch"
        if left < self._fewest or known >= begun:
            return None  # an epoch whose loss is known counts: callbacks are about to hear of it
        logger.warning("%s did not come back in %.0f s", _named(self._away), AWAY_S)
        # The newest checkpoint may be of the rounds that are given up.
        restart = replace(self._begun.restart, saved=False)
        return self._change(averager, replace(self._begun, restart=restart), left)

    def _since(self, at: float) -> set[int]:
        return {rank for rank, since in self._away.items() if since <= at}

    def _keep(self, snapshot: Snapshot) -> None:
        progress = snapshot.restart.progress
        assert progress is not None
        if not progress.rounds:
            self._begun = snapshot.copied()

    def _change(self, averager: Averager, snapshot: Snapshot, after: int) -> str:
        self.losses += len(averager.losses)
        self._next = snapshot.resized(after)
        return f"{averager.world_size} workers become {after}"


def _named(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
