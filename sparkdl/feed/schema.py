"""Which columns feed a model and as what tensors; decided once in the driver, used by workers.

Rows of unequal length (``Ragged``) are their values one after another and how many each row has, as
torch's jagged tensors and Arrow's lists keep them. They are padded only when a minibatch is made of
them, to the longest of its own rows. Nothing here walks over rows in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdl.arguments import listed
from sparkdl.outputs import described
from sparkdl.protocols import Batch, ColumnSpec, Features, SequenceInput

BatchTransform = Callable[[Batch], Batch]
"""Changes a minibatch before it is trained on, for example augments its images."""


@dataclass(frozen=True, slots=True)
class FeedSchema:
    """The columns of a worker's record batches: features, labels, weight, validation indicator.

    Attributes:
        features: one spec per features column.
        label: the label's spec; a tuple where the loss takes several targets as a tuple.
        weight: how much each row's loss counts; None if all count the same.
        validation: which rows are held out; None to train on all of them.
        by_name: whether the model takes its features as one dict, by the columns' names.
    """

    features: tuple[ColumnSpec, ...]
    label: ColumnSpec | tuple[ColumnSpec, ...]
    weight: ColumnSpec | None = None
    validation: ColumnSpec | None = None
    by_name: bool = False

    @property
    def labels(self) -> tuple[ColumnSpec, ...]:
        """The label or labels."""
        return (self.label,) if isinstance(self.label, ColumnSpec) else self.label

    @property
    def stored(self) -> tuple[ColumnSpec, ...]:
        """The columns of a minibatch, in the order of the record batches."""
        return (*self.features, *self.labels, *([self.weight] if self.weight else []))

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """Every column in the order of the record batches."""
        return (*self.stored, *([self.validation] if self.validation else []))

    def of_lengths(self, elements: Sequence[int | None]) -> FeedSchema:
        """The same columns with the array lengths that the data have, None for numbers."""
        known = [c.of_length(n) for c, n in zip(self.columns, elements, strict=True)]
        features = tuple(known[: len(self.features)])
        labels = tuple(known[len(features) : len(features) + len(self.labels)])
        single = isinstance(self.label, ColumnSpec)
        return replace(self, features=features, label=labels[0] if single else labels)

    def batch(self, columns: Sequence[Column], *, last: bool) -> Batch:
        """Put the ``stored`` columns together as models and losses take them.

        Args:
            columns: one per column, of equally many rows; those of unequal length are padded.
            last: whether no more rows follow in this epoch.
        """
        features, others = columns[: len(self.features)], columns[len(self.features) :]
        specs = self.stored[len(self.features) :]
        rest = [dense(*pair) for pair in zip(others, specs, strict=True)]
        return Batch(
            model_inputs(features, self.features, by_name=self.by_name),
            rest[0] if isinstance(self.label, ColumnSpec) else tuple(rest[: len(self.label)]),
            last,
            rest[-1] if self.weight else None,
        )


def input_names(features: Sequence[ColumnSpec]) -> list[str]:
    """Names of a model's inputs: the features, then the masks and lengths of padded ones."""
    return [*(spec.name for spec in features), *sequence_names(features)]


def inputs_described(given: Features, features: Sequence[ColumnSpec]) -> str:
    """The dtypes and shapes of what a model was given, by name, for messages."""
    values = given.values() if isinstance(given, dict) else given
    named = zip(input_names(features), values, strict=True)
    return listed(f"'{name}' {described(each)}" for name, each in named)


def model_inputs(
    columns: Sequence[Column], features: Sequence[ColumnSpec], *, by_name: bool
) -> Features:
    """What a model takes for a minibatch.

    Args:
        columns: of the features; those of unequal length are padded.
        features: what they are.
        by_name: whether it takes them by name, else one after another.
    """
    tensors = inputs_of(columns, features)
    if not by_name:
        return tuple(tensors)
    return dict(zip(input_names(features), tensors, strict=True))


def bytes_of_rows(specs: Sequence[ColumnSpec], lengths: Sequence[Tensor]) -> int | Tensor:
    """Bytes that each row takes: a number, or shape (rows,) if rows are of unequal length.

    Args:
        specs: of all columns.
        lengths: items of the rows in each column that is to be padded, in the order of the specs.
    """
    fixed = sum(s.dtype.itemsize * (s.elements or 0) for s in specs if s.padding is None)
    padded = [s for s in specs if s.padding is not None]
    if not padded:
        return fixed
    of_items = (
        count * (s.dtype.itemsize * math.prod(s.item_shape))
        for s, count in zip(padded, lengths, strict=True)
    )
    return sum(of_items, torch.tensor(fixed))


def order_by_length(columns: Sequence[Column]) -> Tensor | None:
    """The rows sorted by length, so that little is padded; None if none are of unequal length.

    Args:
        columns: of some rows.

    Returns:
        Shape (rows,), int64.
    """
    lengths = [column.lengths for column in columns if isinstance(column, Ragged)]
    return torch.argsort(torch.stack(lengths).sum(0), stable=True) if lengths else None


@dataclass(frozen=True, slots=True)
class Ragged:
    """One column of some rows.

    Attributes:
        values: of all rows, shape (sum of lengths, *item_shape).
        lengths: items of each row, >= 0, shape (rows,), int64, always on the CPU: the shapes of
            minibatches follow from them.
    """

    values: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, sizes: Sequence[int]) -> list[Ragged]:
        """Cut into pieces of these numbers of rows, views."""
        lengths = torch.split(self.lengths, list(sizes))
        items = [int(each.sum()) for each in lengths]
        pieces = zip(torch.split(self.values, items), lengths, strict=True)
        return [Ragged(*piece) for piece in pieces]

    def pick(self, rows: Tensor, *, pinned: bool = False) -> Ragged:
        """Copy rows in any order.

        Args:
            rows: which ones, shape (n,), int64.
            pinned: whether the copy is to lie in pinned memory.
        """
        lengths = self.lengths[rows]
        items = items_of((self.lengths.cumsum(0) - self.lengths)[rows], lengths)
        shape = (len(items), *self.values.shape[1:])
        out = torch.empty(shape, dtype=self.values.dtype, pin_memory=pinned)
        return Ragged(torch.index_select(self.values.detach(), 0, items, out=out), lengths)

    def to(self, device: torch.device) -> Ragged:
        """The same rows with their values on a device."""
        return Ragged(self.values.to(device, non_blocking=True), self.lengths)

    @property
    def longest(self) -> int:
        """Items of the longest row, 1 where all are empty: few models take tensors of no width."""
        return max(1, int(self.lengths.max())) if len(self) else 0

    def real(self) -> Tensor:
        """Which values of the padded rows are real: shape (rows, longest), bool."""
        lengths = self.lengths.to(self.values.device, non_blocking=True)
        return torch.arange(self.longest, device=lengths.device) < lengths[:, None]

    def padded(self, value: float, real: Tensor | None = None) -> Tensor:
        """All rows as one tensor, as long as the longest.

        Args:
            value: what follows the shorter rows.
            real: as ``real`` gives it, if it is known.

        Returns:
            Shape (rows, longest, *item_shape).
        """
        real = self.real() if real is None else real
        item_shape = self.values.shape[1:]
        out = self.values.new_full((*real.shape, *item_shape), value)
        # Takes half the time of an assignment by mask, and does not wait for the GPU.
        return out.masked_scatter_(real.view(*real.shape, *[1 for _ in item_shape]), self.values)

    def mask(self, kind: SequenceInput, real: Tensor | None = None) -> Tensor:
        """What tells a model which of the padded values are real, on the device of the values.

        Args:
            kind: what it takes.
            real: as ``real`` gives it, if it is known.
        """
        if kind == "lengths":
            return self.lengths.to(self.values.device, non_blocking=True)
        real = self.real() if real is None else real
        return ~real if kind == "padding_mask" else real.long()


Column = Tensor | Ragged
"""A column of some rows: a tensor of shape (rows, *row_shape), or rows of unequal length."""


def items_of(starts: Tensor, lengths: Tensor) -> Tensor:
    """Where the items of rows are: ``starts[i]``, ``starts[i] + 1``, ... of each row i.

    Args:
        starts: of each row, shape (rows,), int64.
        lengths: of each row, shape (rows,), int64.

    Returns:
        Shape (sum of lengths,), int64.
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = starts - (ends - lengths)
    return torch.repeat_interleave(shift, lengths, output_size=total) + torch.arange(total)


def picked(column: Column, rows: Tensor, *, pinned: bool = False) -> Column:
    """Copy rows in any order.

    Args:
        column: the rows' own; a model may differentiate with respect to it, in which the copy has
            no part.
        rows: which ones, shape (n,), int64.
        pinned: whether the copy is to lie in pinned memory.
    """
    if isinstance(column, Ragged):
        return column.pick(rows, pinned=pinned)
    out = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=pinned)
    return torch.index_select(column.detach(), 0, rows, out=out)


def cut(column: Column, sizes: Sequence[int]) -> Sequence[Column]:
    """Cut into pieces of these numbers of rows, views."""
    if isinstance(column, Ragged):
        return column.split(sizes)
    return torch.split(column, list(sizes))


def dense(column: Column, spec: ColumnSpec) -> Tensor:
    """A column of a minibatch as a model takes it: padded, or floats of its pixels, if declared."""
    if isinstance(column, Tensor):
        return column if spec.scale is None else spec.scale.floats(column)
    assert spec.padding is not None
    return column.padded(spec.padding.value)


def inputs_of(columns: Sequence[Column], specs: Sequence[ColumnSpec]) -> list[Tensor]:
    """What a model takes of a minibatch: its columns, then what it is told of padded ones.

    Args:
        columns: of one minibatch.
        specs: what they are.
    """
    tensors: list[Tensor] = []
    told: list[Tensor] = []
    for column, spec in zip(columns, specs, strict=True):
        if isinstance(column, Tensor):
            tensors.append(dense(column, spec))
            continue
        assert spec.padding is not None
        real = column.real()
        tensors.append(column.padded(spec.padding.value, real))
        if spec.padding.input is not None:
            told.append(column.mask(spec.padding.input, real))
    return [*tensors, *told]


def sequence_names(specs: Sequence[ColumnSpec]) -> list[str]:
    """The names of what ``inputs_of`` tells of padded columns, for models that take inputs by name.

    Each is named after its kind; where several columns have the same kind, that follows the
    column's own name, as in ``tokens_lengths``.
    """
    kinds = [spec.padding.input for spec in specs if spec.padding is not None]
    return [
        kind if kinds.count(kind) == 1 else f"{spec.name}_{kind}"
        for spec in specs
        if spec.padding is not None and (kind := spec.padding.input) is not None
    ]


def equal_rows(spec: ColumnSpec, numbers: Tensor, items: int | Sequence[int] = 1) -> Column:
    """Made-up rows, each of one number repeated.

    Args:
        spec: of the column; of known shape, or to be padded.
        numbers: one per row, shape (rows,), of any dtype.
        items: of the rows of a column that is to be padded, of each or of all.
    """
    rows = numbers.to(spec.dtype)
    shape = spec.row_shape if spec.padding is None else spec.item_shape
    if spec.padding is None:
        return rows.view(-1, *[1 for _ in shape]).repeat(1, *shape)
    counts = [items] * len(rows) if isinstance(items, int) else list(items)
    lengths = torch.tensor(counts, dtype=torch.int64)
    values = rows.repeat_interleave(lengths)
    return Ragged(values.view(-1, *[1 for _ in shape]).repeat(1, *shape), lengths)
