"""The seams between the layers: small types that several layers share.

A worker is a function of (job, averager, iterator of record batches). What the layers hand to each
other is defined here, so that none has to import another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from sparkdl.encodings import NUMBERS, Encoding
from sparkdl.encodings import UNKNOWN as UNKNOWN
from sparkdl.encodings.scale import Scale
from sparkdl.events import ValidationReport, WindowReport

ModelBuilder = Callable[[], nn.Module]
"""Builds one replica's module."""

Features = tuple[Tensor, ...] | dict[str, Tensor]
"""A model's inputs, each of shape (examples, ...): separate arguments, or one dict by column."""

Targets = Tensor | tuple[Tensor, ...]
"""What the loss compares with, each of shape (examples, ...): a tuple unless it is one label."""

LossFunction = Callable[..., Any]
"""(outputs, targets) -> scalar tensor, the mean over the minibatch's rows; or two, (sum, weight):
the sum over what counts in the minibatch, and what to divide it by."""

OptimizerBuilder = Callable[[Any], torch.optim.Optimizer]
"""parameters -> Optimizer, for example ``partial(torch.optim.SGD, lr=0.1)``; or named_parameters ->
Optimizer, of pairs (name, parameter), if the argument has that name."""

SchedulerBuilder = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
"""optimizer -> LRScheduler, for example ``partial(CosineAnnealingLR, T_max=10)``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One flat stretch of a replica's state: all values of one kind and dtype."""

    kind: str
    """``parameters``, ``buffers`` or ``optimizer``."""
    dtype: torch.dtype
    """Element type on the replica."""
    numel: int
    """Number of elements."""

    @property
    def averaged(self) -> bool:
        """Whether the mean makes sense; integers and booleans are copied from one replica."""
        return self.dtype.is_floating_point

    @property
    def center_dtype(self) -> torch.dtype:
        """Type in which the center is held and sums are formed: never narrower than float32."""
        if self.averaged and self.dtype is not torch.float64:
            return torch.float32
        return self.dtype


Layout = tuple[Segment, ...]
"""All segments of a replica's state, in the order in which they travel."""


def float32_layout(octets: Mapping[str, float]) -> Layout:
    """The layout of a state of float32s of which only the size is known, in bytes by kind."""
    return tuple(
        Segment(kind, torch.float32, round(size / torch.float32.itemsize))
        for kind, size in octets.items()
    )


SequenceInput = Literal["padding_mask", "attention_mask", "lengths"]
"""What a model is given besides padded rows: bool, true at padding (torch's
``src_key_padding_mask``); int64, 1 at values and 0 at padding (Hugging Face's); or int64 lengths.
"""


@dataclass(frozen=True, slots=True)
class Padding:
    """How rows of unequal length become one tensor.

    Attributes:
        value: fills up the rows that are shorter than the longest in their minibatch.
        input: what the model is given besides the padded rows; None for nothing.
    """

    value: float
    input: SequenceInput | None = None


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column and the tensor that it becomes.

    Attributes:
        name: the column's name, as the user knows it.
        dtype: the tensor's element type.
        row_shape: shape of one row's value: () for a number, (k,) for an array of k numbers, or
            (UNKNOWN,) before the data are read; images have (channels, height, width).
        encoding: how the rows arrive, and how they are decoded.
        padding: how minibatches are padded; the first number of ``row_shape`` then stays UNKNOWN.
            None if all rows have the same shape.
        scale: how minibatches of pixels become floats, if they do: rows are kept as bytes.
    """

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...] = ()
    encoding: Encoding = NUMBERS
    padding: Padding | None = None
    scale: Scale | None = None

    @property
    def is_array(self) -> bool:
        """Whether a row holds several numbers."""
        return bool(self.row_shape)

    @property
    def elements(self) -> int | None:
        """Numbers per row; None before the data are read."""
        return None if UNKNOWN in self.row_shape else math.prod(self.row_shape)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of one item of a padded row."""
        return self.row_shape[1:]

    def of_length(self, elements: int | None) -> ColumnSpec:
        """The same column with the length found in the data."""
        if self.row_shape != (UNKNOWN,) or elements is None or self.padding is not None:
            return self
        return replace(self, row_shape=(elements,))


@dataclass(frozen=True, slots=True)
class Batch:
    """One minibatch.

    Attributes:
        features: what the model takes, each tensor of shape (examples, ...).
        targets: what the loss compares the outputs with, shape (examples, ...).
        last: whether this is the epoch's last minibatch.
        weights: how much each row's loss counts, shape (examples,), float32, 1 on average over all
            rows of all workers; None where all rows count equally.
    """

    features: Features
    targets: Targets
    last: bool
    weights: Tensor | None = None

    @property
    def examples(self) -> int:
        """Rows in the minibatch."""
        return len(self._first)

    @property
    def _first(self) -> Tensor:
        """Any one of the tensors; there may be no targets."""
        if isinstance(self.targets, Tensor):
            return self.targets
        features = self.features
        others = tuple(features.values()) if isinstance(features, dict) else features
        return (*self.targets, *others)[0]

    def to(self, device: torch.device) -> Batch:
        """The same rows on a device; the batch itself if they are there already."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        features, targets, weights = self.features, self.targets, self.weights
        if self._first.device == device:
            return self
        return Batch(
            {name: moved(tensor) for name, tensor in features.items()}
            if isinstance(features, dict)
            else tuple(map(moved, features)),
            moved(targets) if isinstance(targets, Tensor) else tuple(map(moved, targets)),
            self.last,
            None if weights is None else moved(weights),
        )


class SpreadValues(Protocol):
    """A segment of which every worker has a part, read and written in stretches."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    def numel(self) -> int:
        """Number of elements of all parts together."""

    def read_on(self, into: Tensor) -> None:
        """Read the next elements, from the segment's first, into a tensor of as many."""

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite what this worker has of the elements from ``start`` on."""


class CenterExchange(Protocol):
    """A worker's end of the averager, as strategies see it."""

    next_fragment: int
    """Which fragment of the state the next round, or the one under way, exchanges; from 0."""
    commit_wanted: bool
    """Whether the driver asked for a commit by everyone when it answered the last gather."""

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round: contribute the segments and overwrite them with the new center.

        They are contributed if the window has weight. A strategy with fragments contributes, and
        has overwritten, the next fragment only.

        If the window is the worker's last of the epoch, the call returns with the epoch's final
        center, after every other worker's last round.

        Args:
            segments: the replica's flat state, one 1-D tensor per segment of the layout.
            window: what was trained on since the last round; its examples weight the contribution.

        Raises:
            NonFiniteError: the segments hold NaN or infinity.
            DeadlineError: the other workers or the averager did not answer in time.
            StoppedError: the averager ended the run.
        """

    def begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Start taking part in one round, while the worker goes on training.

        Args:
            segments: as in ``exchange``; what is contributed is copied before this returns.
            window: as in ``exchange``, and not the epoch's last.

        Raises:
            NonFiniteError: the segments hold NaN or infinity.
        """

    def end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        """Wait for the round's result, and merge it with what the worker has trained since.

        Args:
            segments: as in ``exchange``. In what the round exchanged, floating-point values become
                ``local`` * their own + (1 - ``local``) * the center's, all others the center's.
            local: weight of the worker's own values, in [0, 1).

        Raises:
            DeadlineError: as in ``exchange``.
            StoppedError: the averager ended the run.
        """

    def commit(self, segments: Sequence[Tensor | SpreadValues], window: WindowReport) -> None:
        """Take part in a round whose result every replica already holds.

        For workers that have agreed among themselves: all hold what one of them contributes.

        Args:
            segments: as in ``exchange``; not written to.
            window: as in ``exchange``.

        Raises:
            NonFiniteError: the segments hold NaN or infinity.
            DeadlineError: the other workers or the averager did not answer in time.
            StoppedError: the averager ended the run.
        """

    def heartbeat(self) -> None:
        """Show the averager that this worker is alive during a long window; cheap in every step.

        Raises:
            StoppedError: the averager is gone.
        """

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Give a small JSON object and receive what all ranks gave, in the order of the ranks.

        Every rank has to call it equally often.

        Raises:
            DeadlineError: another worker or the averager did not answer in time.
            StoppedError: the averager ended the run.
        """

    def report_validation(self, report: ValidationReport, states: bytes = b"") -> None:
        """Report to the driver what this worker and its metrics found on its held-out rows."""
