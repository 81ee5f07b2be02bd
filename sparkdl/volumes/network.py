"""The model as a network of patches, in a task and, for a trial, in the driver."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparkdl.checkpoint.identity import describe
from sparkdl.errors import ConfigError, ModelError
from sparkdl.feed.conversion import first_lost, limits
from sparkdl.outputs import OutputKey, described, pick
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import ColumnSpec
from sparkdl.replica.buffers import left_as_it_was
from sparkdl.spark.inference.predictor import Predictor, Running
from sparkdl.volumes.grid import Sizes
from sparkdl.volumes.store import Volume


@dataclass(frozen=True)
class Network:
    """A model that runs here, and takes numpy arrays.

    Attributes:
        run: the model on its device.
        spec: the tensor that it takes.
        key: which of its outputs is taken; None for the only one.
        kept: the size of what is kept of an output, in its middle; None for all of it.
    """

    run: Running
    spec: ColumnSpec
    key: OutputKey | None
    kept: Sizes | None = None

    def __call__(self, patches: np.ndarray) -> Tensor:
        """What it returns for patches, shape (n, channels, *sizes), float32, on its device.

        Args:
            patches: shape (n, channels, *patch), converted to the dtype that the model takes,
                which holds them.

        Raises:
            ModelError: it fails, or returns something else, or what cannot be averaged.
        """
        # numpy has no bfloat16 of its own.
        own = torch.float32 if self.spec.dtype == torch.bfloat16 else self.spec.dtype
        values = patches.astype(torch.empty(0, dtype=own).numpy().dtype)
        given = torch.from_numpy(values).to(self.spec.dtype)
        ((_, returned),) = self.run.outputs([given], [self.spec])
        found = _averageable(pick(returned, self.key, len(given)))
        if found.dim() == given.dim() - 1:
            found = found[:, None]
        if found.dim() != given.dim() or not found.shape[1]:
            raise ModelError(
                f"the model returns {described(found)} for patches of shape {tuple(given.shape)}, "
                "but must return (patches, channels, ...) with as many axes"
            )
        for axis, kept in enumerate(self.kept or (), 2):
            found = found.narrow(axis, (found.shape[axis] - kept) // 2, kept)
        return found


def _averageable(found: Tensor) -> Tensor:
    """The model's output in float32, in which patches are averaged.

    Raises:
        ModelError: it holds what has no mean, or more than float32 does.
    """
    if not found.is_floating_point():
        dtype = str(found.dtype).removeprefix("torch.")
        raise ModelError(
            f"the model returns {dtype}, and patches are averaged where they overlap, but numbers "
            "of classes, ids and truth values have no mean. Have it return the scores, one channel "
            "for each class, before its argmax or comparison, and use reduce='argmax' or compare "
            "the output with a threshold. If they are quantities, have it return them .float()"
        )
    if found.dtype == torch.float64:
        lost = first_lost(values := found.detach().cpu().numpy(), torch.float32)
        if lost is not None:
            raise ModelError(
                f"the model returns {values.flat[lost]} (float64), which float32, in which patches "
                "are averaged, cannot hold. Have it return smaller numbers"
            )
    return found.float()


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types for it
    """Counts the bytes of the tensors that operations return, as long as they are there.

    Attributes:
        most: that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._live: list[tuple[Any, int]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for each operation."""
        returned = operation(*args, **(kwargs or {}))
        for each in tree_leaves(returned):
            if isinstance(each, Tensor) and each.layout == torch.strided:
                storage = each.untyped_storage()
                found = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live.append((found, storage.nbytes()))
        self._live = [each for each in self._live if not each[0].expired()]
        self.most = max(self.most, sum({ref.cdata: n for ref, n in self._live}.values()))
        return returned


def identity_of(module: nn.Module) -> str:
    """What a module is, the same in every process: its class, and a digest of all that it is."""
    parts = json.dumps(describe(module)["parts"], sort_keys=True)
    return f"{type(module).__name__} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class PatchModel:
    """A model that is to predict patches.

    Attributes:
        predictor: as it is sent to the executors; its output columns are ignored.
        spec: the tensor that it takes.
        key: which of its outputs is taken; None for the only one.
    """

    predictor: Predictor
    spec: ColumnSpec
    key: OutputKey | None

    def at_once(self, patches: int) -> PatchModel:
        """The same, which takes so many patches at once, but not more than it takes rows."""
        prediction = self.predictor.prediction
        prediction = replace(prediction, batch_rows=max(1, min(prediction.batch_rows, patches)))
        return replace(self, predictor=replace(self.predictor, prediction=prediction))

    @property
    def taken(self) -> torch.dtype:
        """The dtype that has to hold a voxel: the narrowest of those that it is converted to."""
        own, chosen = self.spec.dtype, self.predictor.prediction.dtype
        if chosen is None or not own.is_floating_point:
            return own
        return min(own, chosen, key=lambda each: limits(each)[1])

    def require_input(self, volume: Volume) -> None:
        """Check that the model takes patches of an array.

        Raises:
            ConfigError: it does not.
        """
        channels, axes, shape = volume.channels or 1, len(volume.shape), self.spec.row_shape
        if len(shape) != axes + 1 or shape[0] != channels:
            raise ConfigError(
                f"the model's example has rows of shape {tuple(shape)}, but {volume.url} has "
                f"{channels} channels and {axes} axes. Make the model with an example of shape "
                f"(1, {channels}, ...), with {axes} more axes of any size"
            )
        if volume.dtype.kind not in "biufV" or volume.dtype.names:
            raise ConfigError(f"{volume.url} holds {volume.dtype}, but a model takes real numbers")

    def try_patch(self, module: nn.Module, patch: np.ndarray) -> tuple[int, Sizes, int]:
        """Predict a patch here, on the CPU.

        Args:
            module: the model; it stays as it is.
            patch: shape (channels, *sizes).

        Returns:
            The channels of its output, what that is smaller than the patch on each side, and how
            many bytes the module takes in a task: its own, and twice what it holds at once, as an
            operation may copy what it is given and returns into a layout of its own.

        Raises:
            ModelError: it fails, or its output cannot be a part of the array.
        """
        predictor = self.predictor
        here = replace(predictor, prediction=replace(predictor.prediction, dtype=None))
        with (
            left_as_it_was(module),
            borrowed_random_numbers(),
            predictor.settings.hold(),
            torch.no_grad(),
            LiveBytes() as live,
        ):
            module.eval()
            found = Network(Running(here, module, "cpu"), self.spec, self.key)(patch[None])[0]
        sizes = tuple(found.shape[1:])
        cut = [n - k for n, k in zip(patch.shape[1:], sizes, strict=True)]
        if any(each < 0 or each % 2 for each in cut):
            raise ModelError(
                f"the model returns {sizes} for a patch of {patch.shape[1:]}. It must return as "
                "many voxels, or leave out equally many on both sides of each axis. If it halves "
                "and doubles them, choose a patch that it can halve"
            )
        own = sum(each.nbytes for each in chain(module.parameters(), module.buffers()))
        at_once = predictor.prediction.batch_rows * (live.most + 4 * patch.size)
        return len(found), tuple(each // 2 for each in cut), own + 2 * at_once
