"""Which columns feed a model and as what tensors; decided once in the driver, used by workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec

ORDER_COLUMN = "order"
"""Name of an int64 column after the schema's own that says in which order the rows belong. A
shuffle delivers the same set of rows in every run, but not in the same order."""


@dataclass(frozen=True, slots=True)
class FeedSchema:
    """The columns of a worker's record batches, in order: the features, then the label.

    Attributes:
        features: one spec a features column.
        label: the label's spec.
    """

    features: tuple[ColumnSpec, ...]
    label: ColumnSpec

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """Every column in the order of the record batches."""
        return (*self.features, self.label)

    def of_lengths(self, elements: Sequence[int | None]) -> FeedSchema:
        """The same columns with the array lengths that the data have, None for numbers."""
        *features, label = [c.of_length(n) for c, n in zip(self.columns, elements, strict=True)]
        return FeedSchema(tuple(features), label)


def to_tensor(values: pa.Array, spec: ColumnSpec) -> Tensor:
    """Convert one column of a record batch, without a copy where Arrow's memory allows.

    Args:
        values: a numeric array, or a list array of numerics; n rows.
        spec: what it becomes.

    Returns:
        Shape (n, *spec.row_shape); read-only where it views Arrow's memory.

    Raises:
        DataError: nulls, or arrays of another length than the spec's.
    """
    if values.null_count:
        raise DataError(
            f"column '{spec.name}' has {values.null_count} null values in a batch of "
            f"{len(values)} rows. Drop or fill them first: df.na.drop / df.na.fill"
        )
    rows = len(values)
    if spec.is_array:
        values = _flatten_lists(values, spec)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    if len(values) == 0:
        return torch.empty((rows, *spec.row_shape), dtype=spec.dtype)
    return from_dlpack(values).to(spec.dtype).view(rows, *spec.row_shape)


def _flatten_lists(values: pa.Array, spec: ColumnSpec) -> pa.Array:
    lengths = values.value_lengths()
    flat = values.flatten()
    (width,) = spec.row_shape
    if len(flat) != len(values) * width or (
        len(values) and lengths.to_numpy(zero_copy_only=False).max() != width
    ):
        found = sorted(set(lengths.to_pylist()))
        raise DataError(
            f"column '{spec.name}' holds arrays of {_some(found)} elements where every row must "
            f"have {width}. Pad or cut them to one length first"
        )
    if flat.null_count:
        raise DataError(
            f"column '{spec.name}' has {flat.null_count} null elements inside its arrays. "
            "Fill them first, for example with F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
        )
    return flat


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown + (", ..." if len(numbers) > 5 else "")
