"""Record batches of few, large columns, and back: Spark writes Arrow one value at a time.

Several columns of numbers come as one of lists, named ``"c0,c1,c2"``. A column of lists comes as
two: ``"c3:float"`` has the bytes of Spark's own arrays; where it is null, ``"c3:rest"`` has the
list or null. A column of vectors comes as ``"c4:vector"``, which says of what kind and size they
are, and two columns of lists, ``"c4 indices"`` and ``"c4 values"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from sparkdl.encodings.linalg import VECTOR_FIELDS

ELEMENTS: dict[str, np.dtype[Any]] = {
    "tinyint": np.dtype(np.int8),
    "smallint": np.dtype(np.int16),
    "int": np.dtype(np.int32),
    "bigint": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
"""The dtype of a packed column's numbers, by its name in SQL."""
PLACE_COLUMN = "place"
"""Name of a column, after the schema's own, that says where the rows are in the user's DataFrame:
the number of the partition in the upper bits, the position in it in the lower ones."""
POSITION_BITS = 33
"""The lower bits of a place, as ``monotonically_increasing_id`` has them."""
ORDER_COLUMN = "order"
"""Name of a column, after the schema's own, that says in which order the rows of a partition
belong: by integers of 64 bits or, if it has only nulls, by what is in the rows. A partition has the
same set of rows in every run, but after a shuffle not in the same order. Rows without it have the
same place in every run."""
REST = "rest"
VECTOR = "vector"
NUMBERED = re.compile(r"c\d+")
"""Names of the columns that may be packed."""
WORD = np.dtype(np.int64)

Length = TypeVar("Length", int, np.ndarray)


def name_of_numbers(names: Sequence[str]) -> str:
    """Name of the column that several columns of numbers come as."""
    return ",".join(names)


def names_of_lists(name: str, element: str) -> tuple[str, str]:
    """Names of the two columns that a column of lists comes as.

    Args:
        name: of the column.
        element: what its lists hold, one of ``ELEMENTS``.
    """
    return f"{name}:{element}", f"{name}:{REST}"


def names_of_vectors(name: str) -> tuple[str, str, str]:
    """Names of the three columns that a column of vectors comes as: kinds, indices and values."""
    return f"{name}:{VECTOR}", f"{name} indices", f"{name} values"


def unpacked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Take the columns of a record batch apart, and put them in the order of their numbers.

    Args:
        batch: columns named ``c0``, ``c1``, ..., which may be packed, and others.

    Returns:
        The same rows: ``c0``, ``c1`` and so on, then the others as they come.
    """
    columns: dict[str, pa.Array] = {}
    vectors: dict[str, pa.Array] = {}
    for packed, values in zip(batch.schema.names, batch.columns, strict=True):
        name, _, kind = packed.partition(":")
        if kind in ELEMENTS:
            rest = batch.column(names_of_lists(name, kind)[1])
            columns[name] = _merged(lists_of_spark(values, ELEMENTS[kind]), rest)
        elif kind == VECTOR:
            vectors[name] = values
        elif kind != REST:
            names = name.split(",")
            columns.update(zip(names, _apart(values, len(names)), strict=True))
    for name, kinds in vectors.items():
        _, *parts = names_of_vectors(name)
        columns[name] = _vectors(kinds, *(columns.pop(part) for part in parts))
    ordered = sorted(columns, key=_number)
    return pa.RecordBatch.from_arrays([columns[name] for name in ordered], names=ordered)


def _number(name: str) -> float:
    return int(name[1:]) if NUMBERED.fullmatch(name) else math.inf


def lists_of_spark(rows: pa.Array, element: np.dtype[Any]) -> pa.Array:
    """Lists of numbers from the bytes of Spark's ``UnsafeArrayData``.

    A row is the number of its elements (8 bytes), a bit for each that says whether it is null, in
    words of 8 bytes, then the elements, padded to 8 bytes.

    Args:
        rows: binary; null where there is no list.
        element: what the elements are.
    """
    present = rows.drop_null() if rows.null_count else rows
    wide = pa.types.is_large_binary(rows.type)
    _, offsets, data = present.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)
    ends = ends[present.offset : present.offset + len(present) + 1] // WORD.itemsize
    words = np.frombuffer(data, WORD, ends[-1]) if data is not None else np.empty(0, WORD)
    lists = _uniform(words, ends, element)
    if lists is None:
        lists = _ragged(words, ends[:-1], element)
    if not rows.null_count:
        return lists
    valid = rows.is_valid().to_numpy(zero_copy_only=False)
    return lists.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _uniform(words: np.ndarray, ends: np.ndarray, element: np.dtype[Any]) -> pa.Array | None:
    """Lists that all have the same number of elements; None if they do not."""
    rows = len(ends) - 1
    size = int(ends[1] - ends[0]) if rows else 0
    if not size or (np.diff(ends) != size).any():
        return None
    table = words[ends[0] :].reshape(rows, size)
    length = int(table[0, 0])
    if (table[:, 0] != length).any():
        return None
    first = _header_words(length)
    values = table[:, first:].view(element)[:, :length].reshape(-1)
    nulls = None
    if table[:, 1:first].any():
        bits = np.unpackbits(table[:, 1:first].view(np.uint8), axis=1, bitorder="little")
        nulls = bits[:, :length].astype(bool).reshape(-1)
    return _lists(values, np.full(rows, length), nulls)


def _ragged(words: np.ndarray, starts: np.ndarray, element: np.dtype[Any]) -> pa.Array:
    lengths = words[starts]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first_elements = (starts + _header_words(lengths)) * (WORD.itemsize // element.itemsize)
    values = words.view(element)[np.repeat(first_elements, lengths) + within]
    flags = words[np.repeat(starts + 1, lengths) + within // 64]
    nulls = (flags >> (within % 64)) & 1 == 1
    return _lists(values, lengths, nulls if nulls.any() else None)


def _header_words(length: Length) -> Length:
    return 1 + (length + 63) // 64


def _lists(values: np.ndarray, lengths: np.ndarray, nulls: np.ndarray | None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, mask=nulls))


def _merged(lists: pa.Array, rest: pa.Array) -> pa.Array:
    """The lists, and the rest where there is none; of one type, whatever a record batch holds."""
    if not lists.null_count:
        return lists
    rest = rest.cast(lists.type)
    if lists.null_count == len(lists):
        return rest
    elsewhere = lists.is_null().to_numpy(zero_copy_only=False)
    both = pa.concat_arrays([lists, rest])
    return both.take(pa.array(np.arange(len(lists)) + elsewhere * len(lists)))


def _vectors(kinds: pa.Array, indices: pa.Array, values: pa.Array) -> pa.Array:
    """Vectors as the structs that Spark keeps them in; dense ones have no indices."""
    parts = [kinds.field("type"), kinds.field("size"), indices, values]
    return pa.StructArray.from_arrays(parts, VECTOR_FIELDS, mask=kinds.is_null())


def _apart(values: pa.Array, width: int) -> list[pa.Array]:
    """The columns of lists that all have ``width`` elements; the column itself if that is 1."""
    if width == 1:
        return [values]
    flat = values.flatten()
    if flat.null_count:
        return [flat.take(pa.array(np.arange(k, len(flat), width))) for k in range(width)]
    return [pa.array(column) for column in flat.to_numpy().reshape(-1, width).T.copy()]
