"""Which columns feed a model and as what tensors; decided once in the driver, used by workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, Ragged, dense, inputs_of, sequence_names
from sparkdl.outputs import described
from sparkdl.protocols import Batch, ColumnSpec, Features

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
    return ", ".join(f"'{name}' {described(each)}" for name, each in named)


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


def lengths_in(columns: Sequence[Column]) -> list[Tensor]:
    """Items of the rows in each column of unequal lengths, in the order of the columns."""
    return [column.lengths for column in columns if isinstance(column, Ragged)]


def order_by_length(columns: Sequence[Column]) -> Tensor | None:
    """The rows sorted by length, so that little is padded; None if none are of unequal length.

    Args:
        columns: of some rows.

    Returns:
        Shape (rows,), int64.
    """
    lengths = lengths_in(columns)
    return torch.argsort(torch.stack(lengths).sum(0), stable=True) if lengths else None
