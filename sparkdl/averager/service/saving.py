"""One checkpoint being put together: the workers' states arrive, then the center is written.

It is made at a commit, from a copy of the center. Workers send their states once they have received
that commit's center; then it is written in the background while training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.coordination.run_state import Restart
from sparkdl.averager.run_events import Progress, WorkerState
from sparkdl.averager.values.center import named
from sparkdl.averager.values.center_update import CenterUpdate, Memory, ReplaceByMean, new_memory
from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore, SavedCheckpoint
from sparkdl.checkpoint.tensor_file import pieces_of, tensor_of
from sparkdl.errors import CheckpointError, TrainingError
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

CENTER = "center."
KEPT_MODEL = "kept-model."
"""What the names of their tensors begin with."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """When checkpoints are written, and where.

    Attributes:
        store: where.
        policy: what the user asks of them. Its ``training`` identifies this one, with those that it
            resumes: another of the same definition may have left checkpoints there.
        last_epoch: the epoch after which there is one in any case.
        config: what defines the training, for whoever resumes it; JSON.
    """

    store: CheckpointStore
    policy: CheckpointPolicy
    last_epoch: int
    config: Mapping[str, Any]

    def due(self, epoch: int) -> bool:
        """Whether the end of an epoch is a checkpoint."""
        return epoch % self.policy.every_epochs == 0 or epoch == self.last_epoch

    def due_within(self, rounds: int) -> bool:
        """Whether it is time for a checkpoint, this many rounds after the last."""
        return rounds >= (self.policy.every_rounds or math.inf)


@dataclass
class KeptModel:
    """A copy of an earlier center, without the optimizer's state; not written to.

    Attributes:
        epoch: the epoch after which it was the center.
        values: a tensor of ``center_dtype`` for each segment of the layout except the optimizer's.
        saved: whether a checkpoint holds it.
    """

    epoch: int
    values: Sequence[Tensor]
    saved: bool = False


def worker_state_name(rank: int) -> str:
    """Name of what holds one worker's state."""
    return f"rank-{rank:05d}"


@dataclass
class Saving:
    """A checkpoint that is being put together.

    A full disk does not end the training: the checkpoint is given up with a warning, and the
    previous one stays.

    Attributes:
        plan: where it goes.
        progress: the progress that it records.
        data: the rows' statistics, for whoever resumes; JSON.
        center: the center's tensors by name, no longer written to.
        kept_model: what the fit is to return instead of the last center, if a callback asked for
            it.
        goes_on: whether the training goes on meanwhile.
        worker_states: a rank's state, which is read when it is written, by rank.
        failed: whether it has been given up.
    """

    plan: CheckpointPlan
    progress: Progress
    data: dict[str, Any]
    center: Mapping[str, Tensor]
    kept_model: KeptModel | None = None
    _: KW_ONLY
    goes_on: bool = True
    worker_states: dict[int, Piece] = field(default_factory=dict)
    failed: bool = False

    def keep(self, state: WorkerState, block: memoryview) -> None:
        """Add a block to a worker's state, unless the checkpoint has been given up."""
        if not self.failed:
            with self._giving_up(TrainingError):
                state.add(block)

    def take_over_worker_states(self) -> None:
        """Take the workers' states from the newest checkpoint, if it belongs to the same commit."""
        with self._giving_up():
            newest = self.plan.store.newest()
            if newest is None or newest.description.get("training") != self.plan.policy.training:
                return
            before = ResumedCheckpoint.of(newest)
            found, present = before.progress, self.progress
            if (found.rounds, found.positions) == (present.rounds, present.positions):
                states = enumerate(map(before.worker_state, range(len(found.positions))))
                self.worker_states = {rank: state for rank, state in states if state is not None}

    def publish(self) -> None:
        """Write the checkpoint; every worker's state must be in."""
        if self.failed:
            return
        kept = self.kept_model
        model = () if kept is None else kept.values
        tensors = {f"{CENTER}{name}": tensor for name, tensor in self.center.items()}
        tensors |= {f"{KEPT_MODEL}{index}": tensor for index, tensor in enumerate(model)}
        given = self.worker_states
        states = {worker_state_name(rank): given[rank] for rank in sorted(given)}
        description = {
            "config": dict(self.plan.config),
            "training": self.plan.policy.training,
            "data": self.data,
            "progress": self.progress.as_json(),
            "kept_model_epoch": None if kept is None else kept.epoch,
        }
        started = time.monotonic()
        with self._giving_up():
            path = self.plan.store.write({**pieces_of(tensors), **states}, description)
            logger.info("wrote %s in %.2f s", path, time.monotonic() - started)
            if kept is not None:
                kept.saved = True
            self.plan.store.prune()

    @contextlib.contextmanager
    def _giving_up(self, refusal: type[Exception] = CheckpointError) -> Iterator[None]:
        """Give the checkpoint up, with a warning, if it cannot be written."""
        try:
            yield
        except refusal as error:
            self.failed = True
            logger.warning(
                "no checkpoint at epoch %d: %s. %she previous checkpoint is kept",
                self.progress.epoch,
                error,
                "Training continues; t" if self.goes_on else "T",
            )


@dataclass(frozen=True, kw_only=True)
class ResumedCheckpoint:
    """A checkpoint that a training resumes from.

    Attributes:
        saved: the checkpoint's file.
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
                    f"{saved.path} is not a checkpoint of a fit: it describes itself as "
                    f"{other}. Use another checkpointPath, or set resume='never'"
                )
        try:
            return cls(saved=saved, progress=Progress.from_json(progress))
        except TypeError as error:
            raise CheckpointError(
                f"{saved.path} does not say how far its training had progressed: {error!r}. "
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
        with torch.device("meta"):
            values = [torch.empty(segment.numel, dtype=segment.center_dtype) for segment in layout]
            memory = new_memory(update or ReplaceByMean(), layout)
        due = named(layout, values, memory)
        tensors = self._tensors("center", CENTER, due)
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
        epoch = self.saved.description.get("kept_model_epoch")
        if epoch is None:
            return None
        model = [segment for segment in layout if segment.kind != "optimizer"]
        due = {
            f"{index}": torch.empty(segment.numel, dtype=segment.center_dtype, device="meta")
            for index, segment in enumerate(model)
        }
        tensors = self._tensors("kept model", KEPT_MODEL, due)
        if type(epoch) is not int or not 0 <= epoch < 10**9:
            raise CheckpointError(f"{self.saved.path} keeps a model of epoch {epoch!r:.20}")
        return KeptModel(epoch, list(tensors.values()), saved=True)

    def worker_state(self, rank: int) -> Piece | None:
        """A rank's state; None if there is none."""
        return self.saved.contents.get(worker_state_name(rank))

    def _tensors(self, what: str, prefix: str, due: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read what has such names, if it is like the tensors that are due."""
        found = {
            name.removeprefix(prefix): (piece.dtype, piece.shape)
            for name, piece in self.saved.contents.items()
            if name.startswith(prefix)
        }
        if found != {name: (piece.dtype, piece.shape) for name, piece in pieces_of(due).items()}:
            raise CheckpointError(
                f"{self.saved.path} belongs to a different model: its {what} holds {found}"
            )
        return {name: tensor_of(self.saved.contents[f"{prefix}{name}"]) for name in due}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How far a training has come, with its values; an averager owns them from then on.

    Attributes:
        center: a tensor of ``center_dtype`` for each segment of the layout.
        memory: what the center's update remembers; None if it starts fresh.
        restart: how far the training of ``center`` has come.
        kept_model: the copy of the center kept up to then, if any.
        resumed: the checkpoint that this process started from, if there was one.
    """

    center: Sequence[Tensor]
    memory: Memory | None = None
    restart: Restart = field(default_factory=Restart)
    kept_model: KeptModel | None = None
    resumed: ResumedCheckpoint | None = None

    def copied(self) -> Snapshot:
        """The same with values of its own."""
        memory = self.memory
        return replace(
            self,
            center=[values.clone() for values in self.center],
            memory=memory and [{key: each.clone() for key, each in of.items()} for of in memory],
        )

    def resized(self, world_size: int) -> Snapshot:
        """The same for another number of workers, at the start of an epoch."""
        return replace(self, restart=self.restart.resized(world_size), resumed=None)
