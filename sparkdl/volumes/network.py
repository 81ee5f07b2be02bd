"""The model as a network of patches, in a task and, for a trial, in the driver."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

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

    def outputs(self, run: Running, patches: np.ndarray, kept: Sizes = ()) -> Tensor:
        """What it returns for patches, shape (n, channels, *sizes), float32, on its device.

        Args:
            run: the model on its device.
            patches: shape (n, channels, *patch), converted to the dtype that the model takes,
                which holds them.
            kept: the size of what is kept of an output, in its middle; all of it by default.

        Raises:
            ModelError: it fails, or returns something else, or what cannot be averaged.
        """
        # numpy has no bfloat16 of its own.
        own = torch.float32 if self.spec.dtype == torch.bfloat16 else self.spec.dtype
        values = patches.astype(torch.empty(0, dtype=own).numpy().dtype)
        given = torch.from_numpy(values).to(self.spec.dtype)
        ((_, returned),) = run.outputs([given], [self.spec])
        found = _averageable(pick(returned, self.key, len(given)))
        if found.dim() == given.dim() - 1:
            found = found[:, None]
        if found.dim() != given.dim() or not found.shape[1]:
            raise ModelError(
                f"the model returns {described(found)} for patches of shape {tuple(given.shape)}, "
                "but must return (patches, channels, ...) with as many axes"
            )
        for axis, size in enumerate(kept, 2):
            found = found.narrow(axis, (found.shape[axis] - size) // 2, size)
        return found

    def try_patch(self, module: nn.Module, patch: np.ndarray) -> tuple[int, Sizes]:
        """Predict a patch here, on the CPU.

        Args:
            module: the model; it stays as it is.
            patch: shape (channels, *sizes).

        Returns:
            The channels of its output, and what that is smaller than the patch on each side.

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
        ):
            module.eval()
            found = self.outputs(Running(here, module, "cpu"), patch[None])[0]
        sizes = tuple(found.shape[1:])
        cut = [n - k for n, k in zip(patch.shape[1:], sizes, strict=True)]
        if any(each < 0 or each % 2 for each in cut):
            raise ModelError(
                f"the model returns {sizes} for a patch of {patch.shape[1:]}. It must return as "
                "many voxels, or leave out equally many on both sides of each axis. If it halves "
                "and doubles them, choose a patch that it can halve"
            )
        return len(found), tuple(each // 2 for each in cut)
