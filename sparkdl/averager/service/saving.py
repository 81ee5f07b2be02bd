"""One checkpoint being put together: the workers' states arrive, then the center is written.

It is made at a commit, from a copy of the center. Workers send their states once they have received
that commit's center; the rest is written in the background while training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.service.snapshot import KeptModel
from sparkdl.averager.values.center import named
from sparkdl.averager.values.center_update import CenterUpdate, Memory, ReplaceByMean, new_memory
from sparkdl.checkpoint.storage import CheckpointStore, PendingCheckpoint, SavedCheckpoint
from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.errors import CheckpointError
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

CENTER = "center.safetensors"
KEPT_MODEL = "kept-model.safetensors"


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """When checkpoints are written, and where.

    Attributes:
        store: where.
        every_epochs: epochs between two checkpoints.
        every_rounds: rounds between two checkpoints; None for only the ends of epochs.
        last_epoch: the epoch after which there is one in any case.
        config: what defines the training, for whoever resumes it; JSON.
        training: identifies it, with those that it resumes: another of the same definition may have
            left checkpoints there.
    """

    store: CheckpointStore
    every_epochs: int
    every_rounds: int | None
    last_epoch: int
    config: Mapping[str, Any]
    training: str | None = None

    def due(self, epoch: int) -> bool:
        """Whether the end of an epoch is a checkpoint."""
        return epoch % self.every_epochs == 0 or epoch == self.last_epoch

    def due_within(self, rounds: int) -> bool:
        """Whether it is time for a checkpoint, this many rounds after the last."""
        return self.every_rounds is not None and rounds >= self.every_rounds


def worker_state_file(rank: int) -> str:
    """Name of the file with one worker's state."""
    return f"rank-{rank:05d}.safetensors"


class Saving:
    """A checkpoint that is being put together.

    A full disk does not end the training: the checkpoint is abandoned with a warning, and the
    previous one stays.

    Args:
        plan: where it goes.
        progress: the progress that it records.
        data: the rows' statistics, for whoever resumes; JSON.
        center: the center's tensors by name, no longer written to.
        kept_model: what the fit is to return instead of the last center, if a callback asked for
            it.
        goes_on: whether the training goes on meanwhile.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        progress: Progress,
        data: dict[str, Any],
        center: Mapping[str, Tensor],
        kept_model: KeptModel | None = None,
        *,
        goes_on: bool = True,
    ) -> None:
        self.failed = False
        self._started = time.monotonic()
        self._plan = plan
        self._progress = progress
        self._data = data
        self._center = center
        self._kept_model = kept_model
        self._goes_on = goes_on
        self._lock = threading.Lock()
        self._pending: PendingCheckpoint | None = None

    def worker_state(self, rank: int) -> WorkerStateFile:
        """Where a rank's state goes, block by block."""
        return WorkerStateFile(self, worker_state_file(rank))

    def take_over_worker_states(self) -> None:
        """Take the workers' states from the newest checkpoint, if it belongs to the same commit."""
        with self.giving_up():
            newest = self._plan.store.newest()
            if newest is None or newest.description.get("training") != self._plan.training:
                return
            before = ResumedCheckpoint.of(newest).progress
            if (before.rounds, before.positions) != (
                self._progress.rounds,
                self._progress.positions,
            ):
                return
            for name in map(worker_state_file, range(len(before.positions))):
                if newest.has(name):
                    with newest.open(name) as source, self.create(name) as target:
                        shutil.copyfileobj(source, target)

    def publish(self) -> None:
        """Write the center and publish the checkpoint; every worker's state must be in."""
        with self.giving_up():
            with self.create(CENTER) as file:
                write_tensors(file, self._center)
            if (kept := self._kept_model) is not None:
                with self.create(KEPT_MODEL) as file:
                    names = {f"{index}": values for index, values in enumerate(kept.values)}
                    write_tensors(file, names, {"epoch": f"{kept.epoch}"})
            self._open().publish(
                {
                    "config": dict(self._plan.config),
                    "training": self._plan.training,
                    "data": self._data,
                    "progress": self._progress.as_json(),
                }
            )
        if self.failed:
            self.abandon()
            return
        if self._kept_model is not None:
            self._kept_model.saved = True
        self._plan.store.prune()
        seconds = time.monotonic() - self._started
        logger.info("wrote %s in %.2f s", self._open().directory, seconds)

    def abandon(self) -> None:
        """Give the checkpoint up, and delete what was written of it."""
        self.failed = True
        with self._lock:
            pending = self._pending
        if pending is not None:
            pending.abandon()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Create one of its files."""
        if self.failed:
            raise CheckpointError("another part of it could not be written")
        with self._open().create(name) as file:
            yield file

    def _open(self) -> PendingCheckpoint:
        with self._lock:
            if self._pending is None:
                self._pending = self._plan.store.begin()
            return self._pending

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """Give the checkpoint up, with a warning, if it cannot be written."""
        try:
            yield
        except CheckpointError as error:
            if not self.failed:
                self.failed = True
                logger.warning(
                    "no checkpoint at epoch %d: %s. %she previous checkpoint is kept",
                    self._progress.epoch,
                    error,
                    "Training continues; t" if self._goes_on else "T",
                )


class WorkerStateFile:
    """One rank's state in a checkpoint; used by one thread at a time.

    Args:
        saving: the checkpoint.
        name: the file's name in it.
    """

    def __init__(self, saving: Saving, name: str) -> None:
        self._saving = saving
        self._name = name
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()

    def write(self, block: memoryview) -> None:
        """Add a block; nothing is written if the checkpoint has been given up."""
        with self._lock, self._saving.giving_up(), self._open() as file:
            if not self._saving.failed:
                file.write(block)

    def close(self) -> None:
        """Finish the file: it is whole, and part of the checkpoint from now on."""
        with self._lock, self._saving.giving_up(), self._open():
            self._stack.close()

    def discard(self) -> None:
        """Leave the file out of the checkpoint: the rest of it will not come."""
        with self._lock, self._saving.giving_up():
            left = CheckpointError("the worker has left")
            self._stack.__exit__(type(left), left, None)

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self._file is None:
            self._file = self._stack.enter_context(self._saving.create(self._name))
        try:
            yield self._file
        except BaseException:
            # The context manager knows what its errors mean.
            if not self._stack.__exit__(*sys.exc_info()):
                raise


@dataclass(frozen=True, kw_only=True)
class ResumedCheckpoint:
    """A checkpoint that a training resumes from.

    Attributes:
        saved: the checkpoint's files.
        progress: how far the training had come.
    """

    saved: SavedCheckpoint
    progress: Progress

    @classmethod
    def of(cls, saved: SavedCheckpoint) -> ResumedCheckpoint:
        """Read what a checkpoint says about itself.

        Raises:
            CheckpointError: it says nothing, or something unreadable.
        """
        match saved.description:
            case {"config": dict(), "data": dict() | None, "progress": dict(progress)}:
                pass
            case other:
                raise CheckpointError(
                    f"{saved.directory} is not a checkpoint of a fit: it describes itself as "
                    f"{other}. Use another checkpointPath, or set resume='never'"
                )
        try:
            return cls(saved=saved, progress=Progress.from_json(progress))
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{saved.directory} does not say how far its training had progressed: {error!r}. "
                "If another version of sparkdl-torch wrote it, use another checkpointPath, or set "
                "resume='never'"
            ) from error

    def read_center(
        self, layout: Layout, update: CenterUpdate | None = None
    ) -> tuple[list[Tensor], Memory]:
        """The center's segments, and what its update remembers.

        Args:
            layout: their kinds and sizes.
            update: the center's update; by default one that remembers nothing.

        Raises:
            CheckpointError: the file cannot be read, or holds other segments.
        """
        with self.saved.open(CENTER) as file:
            tensors, _ = read_tensors(file)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with torch.device("meta"):
            values = [torch.empty(segment.numel, dtype=segment.center_dtype) for segment in layout]
            memory = new_memory(update or ReplaceByMean(), layout)
        due = named(layout, values, memory)
        if found != {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in due.items()}:
            raise CheckpointError(
                f"{self.saved.directory}/{CENTER} belongs to a different model: it holds {found}"
            )
        read = {id(empty): tensors[name] for name, empty in due.items()}
        return (
            [read[id(segment)] for segment in values],
            [{key: read[id(empty)] for key, empty in kept.items()} for kept in memory],
        )

    def read_kept_model(self, layout: Layout) -> KeptModel | None:
        """The model that was kept for the fit to return; None if there is none.

        Args:
            layout: kinds and sizes of the center's segments.

        Raises:
            CheckpointError: the file cannot be read, or holds another model.
        """
        if not self.saved.has(KEPT_MODEL):
            return None
        with self.saved.open(KEPT_MODEL) as file:
            tensors, said = read_tensors(file)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        model = [segment for segment in layout if segment.kind != "optimizer"]
        due = {f"{i}": (each.center_dtype, (each.numel,)) for i, each in enumerate(model)}
        epoch = said.get("epoch", "")
        if found != due or not re.fullmatch("[0-9]{1,9}", epoch):
            raise CheckpointError(
                f"{self.saved.directory}/{KEPT_MODEL} belongs to a different model: it holds "
                f"{found} of epoch {epoch!r:.20}"
            )
        return KeptModel(int(epoch), [tensors[name] for name in due], saved=True)

    def worker_state_bytes(self, rank: int) -> int:
        """Size of a rank's state; 0 if there is none."""
        name = worker_state_file(rank)
        return self.saved.size(name) if self.saved.has(name) else 0

    def worker_state(self, rank: int, block_bytes: int) -> Iterator[bytes]:
        """A rank's state, block by block.

        Raises:
            CheckpointError: the state cannot be read.
        """
        with self.saved.open(worker_state_file(rank)) as file:
            while block := file.read(block_bytes):
                yield block


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The checkpoints that a run reads and writes; by default none.

    Attributes:
        plan: which commits become checkpoints, and where they go.
        resumed: the checkpoint that this process started from, if there was one.
    """

    plan: CheckpointPlan | None = None
    resumed: ResumedCheckpoint | None = None
