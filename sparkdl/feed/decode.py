"""From Arrow columns to tensors: every encoding becomes numbers or lists of numbers, then a tensor.

Rows are handled together wherever that is possible: only encoded images are opened one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sparkdl.arguments import counted
from sparkdl.encodings import NUMBERS
from sparkdl.encodings.encoding import Broken, numpy_of
from sparkdl.errors import DataError
from sparkdl.feed.conversion import first_lost, limits
from sparkdl.feed.schema import Column, Ragged
from sparkdl.protocols import ColumnSpec


@dataclass(frozen=True, slots=True)
class Decoded:
    """One column of one record batch as numbers, or lists of numbers.

    Attributes:
        values: numeric or list array with the nulls that the column had.
        rows: the positions of these rows in the record batch, shape (n,); None for all.
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
    if spec.encoding.is_decoded(values.type):
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
    lists, broken = spec.encoding.decode(values, spec.row_shape, spec.dtype)
    if broken is None:
        return Decoded(lists)
    return Decoded(lists, np.setdiff1d(np.arange(len(values)), broken.rows), broken)


DECODED_BYTES = 64 << 20
"""The most bytes that rows are decoded into at a time; images are far larger than their files."""


def small_parts(
    columns: Sequence[pa.Array], specs: Sequence[ColumnSpec]
) -> Iterator[list[pa.Array]]:
    """The columns of a record batch, cut so that what they are decoded into stays small.

    Args:
        columns: as Spark delivers them.
        specs: what the first of them become.
    """
    total = len(columns[0])
    elements = max(
        spec.encoding.grown_elements(values, spec.row_shape)
        for values, spec in zip(columns, specs, strict=False)
    )
    rows = max(1, DECODED_BYTES // (8 * elements)) if elements else total
    if rows >= total:
        yield list(columns)
        return
    for start in range(0, total, rows):
        yield [values.slice(start, rows) for values in columns]


def usable(column: Decoded, spec: ColumnSpec, rows: int) -> np.ndarray:
    """Which rows have a value that could be decoded, without a null, NaN or infinity in it.

    Args:
        column: the decoded column.
        spec: what it becomes.
        rows: of the record batch.

    Returns:
        Shape (rows,), bool.
    """
    values = column.values
    sound = numpy_of(values.is_valid()).astype(bool)
    if spec.encoding.numeric:
        present = np.flatnonzero(sound)
        values = values.drop_null()  # a null may have elements of its own
        elements = values.flatten() if spec.is_array else values
        wrong = numpy_of(elements.is_null()).astype(bool)
        if pa.types.is_floating(elements.type):
            wrong |= ~np.isfinite(elements.to_numpy(zero_copy_only=False))
        if wrong.any():
            parents = numpy_of(pc.list_parent_indices(values)) if spec.is_array else slice(None)
            sound[present[parents][wrong]] = False
    everywhere = np.zeros(rows, dtype=bool)
    everywhere[slice(None) if column.rows is None else column.rows] = sound
    return everywhere


def kept(column: Decoded, valid: np.ndarray) -> Decoded:
    """Some rows of a decoded column.

    Args:
        column: the column.
        valid: which rows of the record batch, shape (rows,), bool.
    """
    at = np.arange(len(valid)) if column.rows is None else column.rows
    chosen, broken = valid[at], column.broken
    if broken is not None:
        left = broken.rows[valid[broken.rows]]
        broken = Broken(left, broken.reason) if len(left) else None
    return Decoded(column.values.filter(pa.array(chosen)), at[chosen], broken)


def instead_of_nulls(spec: ColumnSpec) -> str:
    """What to do about rows without a value: ``df.na.fill`` fills numbers, but no arrays.

    Args:
        spec: the column and what it becomes.
    """
    name = in_sql(spec.name)
    value = ""
    if spec.padding is not None:
        value = "an empty array: F.coalesce('{}', F.array())"
    elif spec.encoding == NUMBERS and spec.is_array:
        value = "an array: F.coalesce('{}', F.array(F.lit(0.0), ...))"
    elif spec.encoding == NUMBERS:
        kind, instead = ("truth value", False) if spec.dtype is torch.bool else ("number", 0)
        value = f"a {kind}: F.coalesce('{{}}', F.lit({instead}))"
    other = f", or put in their place {value.format(name)}" if value else ""
    return f'Drop these rows first with df.where("{name} IS NOT NULL"){other}'


def without_infinity(name: str, *, is_array: bool) -> str:
    """What to do about rows with NaN or infinity, of which ``df.na.fill`` fills NaN alone.

    Args:
        name: the column's.
        is_array: whether its rows are arrays, not numbers.
    """
    column, finite = f'"{in_sql(name)}"', "F.abs({}) < float('inf')"
    held = finite.format(column)
    if is_array:
        held = f"F.forall({column}, lambda x: {finite.format('x')})"
    return f"Drop these rows first: df.where({held})"  # NaN is larger than infinity in Spark


def in_sql(name: str) -> str:
    """A column's name as Spark's SQL and functions read it, whatever it consists of."""
    return "`" + name.replace("`", "``") + "`"


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
    _require_no_nulls(values, spec)
    if spec.padding is None:
        return to_tensor(values, spec)
    width = math.prod(spec.item_shape)
    numbers = replace(spec, row_shape=(), padding=None)
    lengths = numpy_of(values.value_lengths()) // width
    flat = to_tensor(values.flatten(), numbers).view(-1, *spec.item_shape)
    return Ragged(flat, torch.from_numpy(lengths.astype(np.int64)))


def to_tensor(values: pa.Array, spec: ColumnSpec) -> Tensor:
    """The same for rows of equal shape, without nulls."""
    rows = len(values)
    if spec.is_array:
        values = _flatten_lists(values, spec)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    if len(values) == 0:
        return torch.empty((rows, *spec.row_shape), dtype=spec.dtype)
    numbers = spec.encoding.tensor(from_dlpack(values), spec.dtype)
    return numbers.view(rows, *spec.row_shape)


def tensors_of(columns: Iterable[pa.Array], specs: Iterable[ColumnSpec]) -> list[Column]:
    """Decode and convert the columns of one record batch.

    Args:
        columns: as Spark delivers them.
        specs: what they become.

    Raises:
        DataError: a row cannot become part of a tensor.
    """
    pairs = list(zip(columns, specs, strict=True))
    return _tensors([(decode(*pair), pair[1]) for pair in pairs])


def valid_tensors(
    columns: Sequence[pa.Array], specs: Sequence[ColumnSpec]
) -> tuple[list[Column], np.ndarray | None]:
    """The same for the rows that have a usable value in every column.

    Returns:
        The tensors of those rows; and which they are, shape (rows,), bool, or None for all.

    Raises:
        DataError: another row cannot become part of a tensor.
    """
    pairs = [(decode(*pair), pair[1]) for pair in zip(columns, specs, strict=True)]
    rows = len(columns[0])
    valid = np.logical_and.reduce([usable(*pair, rows) for pair in pairs])
    if valid.all():
        return _tensors(pairs), None
    return _tensors([(kept(decoded, valid), spec) for decoded, spec in pairs]), valid


def _tensors(columns: Iterable[tuple[Decoded, ColumnSpec]]) -> list[Column]:
    converted = []
    for decoded, spec in columns:
        if decoded.broken is not None:
            row, broken = decoded.broken.rows[0], len(decoded.broken.rows)
            raise DataError(
                f"column '{spec.name}' has {counted(broken, 'row')} in a batch of "
                f"{broken + len(decoded.values)} that cannot be decoded: row {row} "
                f"{decoded.broken.reason}"
            )
        converted.append(to_column(decoded.values, spec))
        if spec.encoding.numeric:
            _require_holdable(decoded, spec)
    return converted


def _require_holdable(column: Decoded, spec: ColumnSpec) -> None:
    """Refuse numbers that the tensor's dtype cannot hold, as a fit does; none is null."""
    values = column.values
    numbers = numpy_of(values.flatten() if spec.is_array else values)
    place = first_lost(numbers, spec.dtype) if len(numbers) else None
    if place is None:
        return
    row = pc.list_parent_indices(values)[place].as_py() if spec.is_array else place
    row = row if column.rows is None else column.rows[row]
    where = f"in row {row} of a batch of {len(values)}"
    refuse_lost(numbers[place], spec, where)


def refuse_lost(number: np.number[Any], spec: ColumnSpec, where: str) -> NoReturn:
    """Raise the error for a number that a tensor's dtype cannot hold.

    Args:
        number: what is lost.
        spec: what its column becomes.
        where: its place, in words.
    """
    dtype = str(spec.dtype).removeprefix("torch.")
    low, high = limits(spec.dtype)
    remedy = f"Bring the numbers into its range first, {low:g} to {high:g}"
    if not np.isfinite(number):
        remedy = without_infinity(spec.name, is_array=spec.is_array)
    elif low < float(number) < high:
        remedy = "Round the numbers first with F.round"
    raise DataError(
        f"column '{spec.name}' holds {number} ({number.dtype}) {where}, which {dtype}, the dtype "
        f"of its tensor, cannot hold. {remedy}"
    )


FILL_ELEMENTS = (
    "Fill them first, for example with F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
)


def _require_no_nulls(values: pa.Array, spec: ColumnSpec) -> None:
    """Refuse rows that are null, and arrays that hold a null."""
    if values.null_count:
        raise DataError(
            f"column '{spec.name}' has {counted(values.null_count, 'null value')} in a batch of "
            f"{counted(len(values), 'row')}. {instead_of_nulls(spec)}"
        )
    if spec.is_array and (nulls := values.flatten().null_count):
        raise DataError(
            f"column '{spec.name}' has {counted(nulls, 'null element')} inside its arrays. "
            f"{FILL_ELEMENTS}"
        )


def _flatten_lists(values: pa.Array, spec: ColumnSpec) -> pa.Array:
    lengths = values.value_lengths()
    flat = values.flatten()
    width = spec.encoding.list_length(spec.elements or 0, spec.dtype)
    if len(flat) != len(values) * width or (
        len(values) and lengths.to_numpy(zero_copy_only=False).max() != width
    ):
        found = sorted(set(lengths.to_pylist()))
        raise DataError(
            f"column '{spec.name}' holds arrays of {_some(found)} elements where every row must "
            f"have {width}. Pad or cut them to one length first"
        )
    return flat


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown + (", ..." if len(numbers) > 5 else "")
