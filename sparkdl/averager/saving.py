"""One checkpoint being put together: the workers' own states arrive, then the center is written.

It is made at a commit, of a copy of the center. Workers send their own states when they have taken
that commit's center; the rest is written in the background while training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from torch import Tensor

from sparkdl.averager.progress import Progress
from sparkdl.checkpoint.storage import CheckpointStore, PendingCheckpoint, SavedCheckpoint
from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.errors import CheckpointError
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

CENTER = "center.safetensors"


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """When checkpoints are written, and where.

    Attributes:
        store: where.
        every: epochs between two.
        every_rounds: rounds between two; None for the ends of epochs only.
        last_epoch: after which there is one in any case.
        config: what the training is, for whoever resumes it; JSON.
    """

    store: CheckpointStore
    every: int
    every_rounds: int | None
    last_epoch: int
    config: Mapping[str, Any]

    def due(self, epoch: int) -> bool:
        """Whether the end of an epoch is a checkpoint."""
        return epoch % self.every == 0 or epoch == self.last_epoch

    def due_within(self, rounds: int) -> bool:
        """Whether it is time for a checkpoint, so many rounds after the last."""
        return self.every_rounds is not None and rounds >= self.every_rounds


def _segment_names(layout: Layout) -> list[str]:
    return [f"{index}.{segment.kind}" for index, segment in enumerate(layout)]


def own_state_file(rank: int) -> str:
    """Name of the file with one worker's own state."""
    return f"rank-{rank:05d}.safetensors"


class Saving:
    """A checkpoint that is being put together.

    A disk that is full does not end the training: the checkpoint is given up in a warning, and the
    one before it stays.

    Args:
        plan: where it goes.
        progress: what it is of.
        data: the facts about the rows, for whoever resumes; JSON.
        layout: kinds and sizes of the center's segments.
        center: its segments, not written to any more.
        ranks: whose own states belong to it.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        progress: Progress,
        data: dict[str, Any],
        layout: Layout,
        center: Sequence[Tensor],
        ranks: Iterable[int],
    ) -> None:
        self.started = time.monotonic()
        self.failed = False
        self._plan = plan
        self._progress = progress
        self._data = data
        self._center = dict(zip(_segment_names(layout), center, strict=True))
        self._lock = threading.Lock()
        self._awaited = set(ranks)
        self._pending: PendingCheckpoint | None = None

    @property
    def epoch(self) -> int:
        """The epoch that was under way, counted from 1."""
        return self._progress.epoch

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks whose own states have yet to come."""
        with self._lock:
            return frozenset(self._awaited)

    def awaits(self, rank: int) -> bool:
        """Whether a rank's own state has yet to come."""
        return rank in self._awaited

    def take(self, rank: int, blocks: Iterator[memoryview]) -> bool:
        """Write a rank's own state as it arrives; returns whether it was the last that was awaited.

        Args:
            rank: whose.
            blocks: its bytes; read to the end in any case.
        """
        with self._giving_up(), self._file(own_state_file(rank)) as file:
            for block in blocks:
                file.write(block)
        for _ in blocks:
            pass  # the worker sends all of it, whatever became of the first part
        return self.forgo(rank)

    def forgo(self, rank: int) -> bool:
        """Do without a rank's own state; returns whether it was the last that was awaited."""
        with self._lock:
            was_awaited = rank in self._awaited
            self._awaited.discard(rank)
            return was_awaited and not self._awaited

    def publish(self) -> None:
        """Write the center and make the checkpoint exist."""
        with self._giving_up():
            with self._file(CENTER) as file:
                write_tensors(file, self._center)
            self._open().publish(
                {
                    "config": dict(self._plan.config),
                    "data": self._data,
                    "progress": self._progress.as_json(),
                }
            )
        if self.failed:
            self.abandon()
            return
        self._plan.store.prune()
        seconds = time.monotonic() - self.started
        logger.info("wrote %s in %.2f s", self._open().directory, seconds)

    def abandon(self) -> None:
        """Give it up, and delete what was written of it."""
        self.failed = True
        with self._lock:
            pending = self._pending
        if pending is not None:
            pending.abandon()

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
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
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not self.failed:
                self.failed = True
                logger.warning(
                    "no checkpoint at epoch %d: %s. Training goes on; the checkpoint before "
                    "this one stays",
                    self._progress.epoch,
                    error,
                )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A checkpoint from which a training goes on.

    Attributes:
        saved: the files.
        progress: how far it had come.
    """

    saved: SavedCheckpoint
    progress: Progress

    @classmethod
    def of(cls, saved: SavedCheckpoint) -> Resumed:
        """Read what a checkpoint says of itself.

        Raises:
            CheckpointError: it says nothing, or something else.
        """
        match saved.description:
            case {"config": dict(), "data": dict() | None, "progress": dict(progress)}:
                pass
            case other:
                raise CheckpointError(
                    f"{saved.directory} is no checkpoint of a fit: it says it is of {other}. Give "
                    "another checkpointPath, or set resume='never'"
                )
        try:
            return cls(saved=saved, progress=Progress.from_json(progress))
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{saved.directory} does not say how far its training had come: {error!r}"
            ) from error

    def read_center(self, layout: Layout) -> list[Tensor]:
        """The center's segments.

        Args:
            layout: their kinds and sizes.

        Raises:
            CheckpointError: the file cannot be read, or is of other segments.
        """
        with self.saved.open(CENTER) as file:
            tensors, _ = read_tensors(file)
        names = _segment_names(layout)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        kinds = [(segment.center_dtype, (segment.numel,)) for segment in layout]
        if found != dict(zip(names, kinds, strict=True)):
            raise CheckpointError(
                f"{self.saved.directory}/{CENTER} is of another model: it holds {found}"
            )
        return [tensors[name] for name in names]

    def own_state_bytes(self, rank: int) -> int:
        """Size of a rank's own state; 0 if there is none."""
        name = own_state_file(rank)
        return self.saved.size(name) if self.saved.has(name) else 0

    def open_own_state(self, rank: int) -> contextlib.AbstractContextManager[BinaryIO]:
        """A rank's own state, to be read as a stream."""
        return self.saved.open(own_state_file(rank))
