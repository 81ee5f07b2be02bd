"""From Arrow columns to tensors: every encoding becomes numbers or lists of numbers, then a tensor.

Rows are handled together wherever that is possible: only encoded images are opened one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sparkdl.errors import DataError
from sparkdl.feed.images import decode_images, decode_pixels
from sparkdl.feed.linalg import MAX_SIZE, decode_matrices, decode_vectors
from sparkdl.feed.lists import Broken, binary_bytes, broken_where, lists_of, numpy_of
from sparkdl.feed.ragged import Column, Ragged
from sparkdl.protocols import UNKNOWN, ColumnSpec

GROWING = ("image", "matrix", "vector")
"""Encodings whose rows may become far larger than they arrive."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One column of one record batch as numbers, or lists of numbers.

    Attributes:
        values: numeric or list array with the nulls that the column had.
        rows: the positions in the record batch of those rows, shape (n,); None for all.
        broken: rows that could not be decoded, which are not among ``values``.
    """

    values: pa.Array
    rows: np.ndarray | None = None
    broken: Broken | None = None


def decode(values: pa.Array, spec: ColumnSpec) -> Decoded:
    """Turn one column of a record batch into numbers, or lists of numbers.

    Args:
        values: as Spark delivers them.
        spec: what they are and what they become.
    """
    if spec.encoding == "numbers" and not _nested(values.type):
        return Decoded(values)
    if values.null_count:
        # Rows without a value are counted elsewhere; the others keep their positions.
        valid = numpy_of(values.is_valid()).astype(bool)
        present = _decode_present(values.filter(pa.array(valid)), spec)
        rows = np.flatnonzero(valid)
        broken = present.broken and present.broken.at(rows)
        kept = rows if present.rows is None else rows[present.rows]
        with_nulls = pa.concat_arrays(
            [present.values, pa.nulls(values.null_count, present.values.type)]
        )
        return Decoded(with_nulls, np.concatenate([kept, np.flatnonzero(~valid)]), broken)
    return _decode_present(values, spec)


def _decode_present(values: pa.Array, spec: ColumnSpec) -> Decoded:
    decoders = {
        "numbers": flatten_nested,
        "vector": decode_vectors,
        "matrix": decode_matrices,
        "bytes": _reinterpret,
        "image": decode_images,
        "pixels": decode_pixels,
    }
    lists, broken = decoders[spec.encoding](values, spec)
    if broken is None:
        return Decoded(lists)
    return Decoded(lists, np.setdiff1d(np.arange(len(values)), broken.rows), broken)


def to_column(values: pa.Array, spec: ColumnSpec) -> Column:
    """Convert one decoded column, without a copy where Arrow's memory allows.

    Args:
        values: a numeric array, or a list array of numerics; n rows.
        spec: what it becomes.

    Returns:
        Shape (n, *spec.row_shape), or ragged if it is to be padded; read-only where it views
        Arrow's memory.

    Raises:
        DataError: nulls, or arrays of another length than the spec's.
    """
    if spec.padding is None:
        return to_tensor(values, spec)
    width = math.prod(spec.item_shape)
    numbers = replace(spec, row_shape=(), encoding="numbers", padding=None)
    lengths = numpy_of(values.value_lengths()) // width
    flat = to_tensor(values.flatten(), numbers).view(-1, *spec.item_shape)
    return Ragged(flat, torch.from_numpy(lengths.astype(np.int64)))


def to_tensor(values: pa.Array, spec: ColumnSpec) -> Tensor:
    """Convert one decoded column of rows of equal shape.

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
    numbers = from_dlpack(values)
    if spec.encoding == "bytes":
        return numbers.view(spec.dtype).view(rows, *spec.row_shape)
    return numbers.to(spec.dtype).view(rows, *spec.row_shape)


def tensors_of(columns: Iterable[pa.Array], specs: Iterable[ColumnSpec]) -> list[Column]:
    """Decode and convert the columns of one record batch.

    Args:
        columns: as Spark delivers them.
        specs: what they become.

    Raises:
        DataError: a row cannot become part of a tensor.
    """
    converted = []
    for values, spec in zip(columns, specs, strict=True):
        decoded = decode(values, spec)
        if decoded.broken is not None:
            row, reason = decoded.broken.rows[0], decoded.broken.reason
            raise DataError(
                f"column '{spec.name}' has {len(decoded.broken.rows)} rows in a batch of "
                f"{len(values)} that cannot be decoded: row {row} {reason}"
            )
        if spec.padding is not None:
            _require_numbers(decoded.values, spec)
        converted.append(to_column(decoded.values, spec))
    return converted


def flatten_nested(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Nested lists as one list a row.

    Args:
        values: lists of lists of numbers, no row null.
        spec: its row shape has one dimension a level.
    """
    inner, parents = values, np.arange(len(values))
    wrong = np.zeros(len(values), dtype=bool)
    ends = None
    for length in spec.row_shape:
        lengths = numpy_of(inner.value_lengths().fill_null(-1))
        if length == UNKNOWN:
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        elif (lengths != length).any():
            wrong[parents[lengths != length]] = True
        if not _nested(inner.type):
            break
        parents = np.repeat(parents, np.maximum(lengths, 0))  # a null list has no elements
        inner = inner.flatten()
    shape = str(spec.row_shape).replace(str(UNKNOWN), "any length")
    broken = broken_where(wrong, f"is not an array of shape {shape}")
    if broken is not None:
        kept: pa.Array = values.filter(pa.array(~wrong))
        return flatten_nested(kept, spec)[0], broken
    if ends is not None:
        ends *= math.prod(spec.item_shape)
        return pa.LargeListArray.from_arrays(pa.array(ends), inner.flatten()), None
    return lists_of(inner.flatten(), len(values)), None


def _reinterpret(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """A tensor's own bytes as a list of bytes."""
    elements = spec.elements
    assert elements is not None
    size = elements * spec.dtype.itemsize
    lengths = numpy_of(pc.binary_length(values))
    wrong = lengths != size
    if wrong.any():
        found = int(lengths[wrong][0])
        broken = broken_where(
            wrong,
            f"has {found} bytes, but {spec.dtype} of shape {spec.row_shape} takes {size}".replace(
                "torch.", ""
            ),
        )
        return _reinterpret(values.filter(pa.array(~wrong)), spec)[0], broken
    return lists_of(binary_bytes(values), len(values)), None


def _nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_list(kind.value_type))


def _require_numbers(values: pa.Array, spec: ColumnSpec) -> None:
    """Refuse rows that are null, and arrays that hold a null."""
    flat = values.flatten()
    if values.null_count:
        raise DataError(
            f"column '{spec.name}' has {values.null_count} null values in a batch of "
            f"{len(values)} rows. Make empty arrays of them: F.coalesce(col, F.array())"
        )
    if flat.null_count:
        raise DataError(
            f"column '{spec.name}' has {flat.null_count} null elements inside its arrays. "
            "Fill them first, for example with F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
        )


def _flatten_lists(values: pa.Array, spec: ColumnSpec) -> pa.Array:
    lengths = values.value_lengths()
    flat = values.flatten()
    width = spec.elements or 0
    if spec.encoding == "bytes":
        width *= spec.dtype.itemsize
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


def decoded_elements(values: pa.Array, spec: ColumnSpec) -> int:
    """Numbers a row of a column whose rows grow when decoded; 0 for one whose rows do not."""
    if spec.encoding == "vector" and len(values):
        longest: int = pc.max(pc.struct_field(values, "size")).as_py() or 0
        return min(longest, MAX_SIZE)
    return (spec.elements or 0) if spec.encoding in GROWING else 0
