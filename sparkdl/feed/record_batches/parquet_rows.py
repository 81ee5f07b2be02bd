"""Columns that are read from the files in which rows say that they lie: Parquet, or whole files.

The JVM decodes arrays one element at a time, and Spark writes them for Python once more: 784 floats
take it ten times as long as pyarrow needs to read them. So where Spark only reads files, a row can
come as the file that it is in and its number there, in a column of structs ``path`` and ``row``
whose name says which columns they stand for; the worker reads those itself.

The JVM reads a whole file at once, but copies it three times until Python has it: 40 KB take it
longer than opening them takes here. So where Spark only lists files (``binaryFile``), rows say the
paths, and the worker opens them itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.encodings import VECTOR
from sparkdl.encodings.linalg import VECTOR_TYPE
from sparkdl.errors import DataError

IN_FILES = "in files "
"""The beginning of the name of the column that says where rows lie; JSON follows."""
PATH, ROW = "path", "row"
PIECE_BYTES = 2 << 20
"""What is read at a time is still in the processor's cache when it is used; see
``spark.rows.packing``."""
MAX_PIECE_ROWS = 1 << 13
MAX_BYTES = 2**31 - 1
"""Of a whole file: no array of Java's, and so no row of Spark's, has more."""

_KINDS: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    VECTOR.name: VECTOR_TYPE,
}
KINDS = frozenset(_KINDS)
"""What columns in files may hold, themselves or in nested arrays: names of SQL's types, and
``vector`` for pyspark.ml's."""
WHOLE = "file"
"""The kind of a column that holds whole files, which ``WholeFiles`` reads."""


@dataclass(frozen=True, slots=True)
class FileColumn:
    """A column in Parquet files, or of whole files.

    Attributes:
        field: its name there.
        kind: what it holds, or its arrays do; one of ``KINDS``, or ``WHOLE``.
        dimensions: how deeply its arrays are nested; 0 for plain values.
        exactly: whether the case of the name's letters matters.
    """

    field: str
    kind: str
    dimensions: int
    exactly: bool

    @property
    def type(self) -> pa.DataType:
        """As which it arrives."""
        kind = _KINDS[self.kind]
        for _ in range(self.dimensions):
            kind = pa.list_(kind)
        return kind


def name_of_columns(columns: Mapping[str, FileColumn]) -> str:
    """The name of the column that says where rows lie.

    Args:
        columns: what is to be read there, by the names under which it is to arrive.
    """
    told = {
        name: [each.field, each.kind, each.dimensions, each.exactly]
        for name, each in columns.items()
    }
    return IN_FILES + json.dumps(told)


def columns_of_name(name: str) -> dict[str, FileColumn]:
    """The columns that such a name tells."""
    told = json.loads(name.removeprefix(IN_FILES))
    return {key: FileColumn(*each) for key, each in told.items()}


def path_of(url: str) -> str:
    """The path in a URL of a file, as Spark's metadata write it."""
    return unquote(urlsplit(url).path)


class FileReader:
    """Reads rows of Parquet files in the order of their numbers, each file once if they come so.

    Args:
        columns: what to read, by the names under which it is to arrive.
    """

    def __init__(self, columns: Mapping[str, FileColumn]) -> None:
        self._columns = columns
        self._path = ""
        self._file: pq.ParquetFile | None = None
        self._fields: dict[str, str | None] = {}
        self._group = -1
        self._group_ends = np.empty(0, np.int64)
        self._batches: Iterator[pa.RecordBatch] = iter(())
        # The rows from first to stop of the file, which were read last.
        self._found: dict[str, pa.Array] = {}
        self._first = self._stop = 0

    def read(self, places: pa.StructArray) -> Iterator[dict[str, pa.Array]]:
        """Read the columns of some rows.

        Args:
            places: structs of ``path``, as Spark's metadata write it, and ``row``.

        Yields:
            The columns of some of the rows at a time, in the order of ``places``.
        """
        paths = places.field(PATH).dictionary_encode()
        files, rows = paths.indices.to_numpy(), places.field(ROW).to_numpy()
        # Where the row's number does not grow, a file is read a second time.
        breaks = (np.diff(files) != 0) | (np.diff(rows) <= 0)
        for run in np.split(np.arange(len(rows)), np.flatnonzero(breaks) + 1):
            if len(run):
                path = paths.dictionary[int(files[run[0]])].as_py()
                yield from self._of_file(path, rows[run])

    def _of_file(self, path: str, rows: np.ndarray) -> Iterator[dict[str, pa.Array]]:
        try:
            if path != self._path or rows[0] < self._first:
                self._open(path)
            while len(rows):
                while rows[0] >= self._stop:
                    self._read_on(int(rows[0]))
                inside = int(np.searchsorted(rows, self._stop))
                yield self._chosen(rows[:inside] - self._first)
                rows = rows[inside:]
        except (OSError, pa.ArrowException, StopIteration) as error:
            names = ", ".join(column.field for column in self._columns.values())
            raise DataError(
                f"the columns {names} could not be read from {path}: "
                f"{error or 'it ends too soon'}. If the file is intact and Spark can read it, let "
                "Spark do so: df.withColumn(name, F.expr(name))"
            ) from error

    def _open(self, path: str) -> None:
        self._path, self._file = "", None
        file = pq.ParquetFile(path_of(path), memory_map=True)
        groups = range(file.metadata.num_row_groups)
        self._group_ends = np.cumsum([file.metadata.row_group(k).num_rows for k in groups])
        self._group, self._first, self._stop = -1, 0, 0
        self._fields = {
            name: _field_of(column, file.schema_arrow) for name, column in self._columns.items()
        }
        self._path, self._file = path, file

    def _read_on(self, row: int) -> None:
        """Read what follows, or what is in the group of rows that has the row."""
        assert self._file is not None
        group = int(np.searchsorted(self._group_ends, row, side="right"))
        if group >= len(self._group_ends):
            raise OSError(f"row {row} is past its last one: the file was rewritten in the meantime")
        if group != self._group:
            told = self._file.metadata.row_group(group)
            self._group, self._stop = group, int(self._group_ends[group]) - told.num_rows
            fields = sorted({field for field in self._fields.values() if field is not None})
            # Dictionaries and run lengths hide how large rows are; then pieces are larger.
            row_bytes = told.total_byte_size // max(1, told.num_rows)
            self._batches = self._file.iter_batches(
                min(MAX_PIECE_ROWS, max(1, PIECE_BYTES // max(1, row_bytes))),
                row_groups=[group],
                columns=fields,
                use_threads=False,
            )
        batch = next(self._batches)
        self._first, self._stop = self._stop, self._stop + batch.num_rows
        self._found = {
            name: (
                pa.nulls(batch.num_rows, column.type)
                if self._fields[name] is None
                else _as(column.type, batch.column(self._fields[name]))
            )
            for name, column in self._columns.items()
        }

    def _chosen(self, rows: np.ndarray) -> dict[str, pa.Array]:
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first + 1 == count:
            return {name: each.slice(first, count) for name, each in self._found.items()}
        return {name: each.take(pa.array(rows)) for name, each in self._found.items()}


def _field_of(column: FileColumn, schema: pa.Schema) -> str | None:
    """The name of a column in a file; None if it has none, for Spark a column of nulls.

    Raises:
        ArrowException: Spark would find several, or read its type in a way of its own.
    """
    names: list[str] = schema.names
    same = names if column.exactly else [name.lower() for name in names]
    wanted = column.field if column.exactly else column.field.lower()
    found = [name for name, each in zip(names, same, strict=True) if each == wanted]
    if len(found) > 1:
        raise pa.ArrowInvalid(f"it has several columns of that name: {', '.join(found)}")
    if not found:
        return None
    kind = schema.field(found[0]).type
    if not _is_readable(kind, column.type):
        raise pa.ArrowInvalid(f"it holds {kind} in the column {found[0]}, not {column.type}")
    return found[0]


_READ_AS: Mapping[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int16(): (pa.int8(), pa.uint8()),
    pa.int32(): (pa.int8(), pa.int16(), pa.uint8(), pa.uint16()),
    pa.int64(): (pa.int8(), pa.int16(), pa.int32(), pa.uint32()),
    pa.float64(): (pa.float32(), pa.int8(), pa.int16(), pa.int32()),
    pa.binary(): (pa.string(), pa.large_string(), pa.large_binary()),
}
"""What may be in a file, by what Spark reads it as without changing a value."""


def _is_readable(found: pa.DataType, kind: pa.DataType) -> bool:
    """Whether Spark reads what a file says that it holds as the same values of another type."""
    if isinstance(found, pa.BaseExtensionType):
        found = found.storage_type
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_list(kind):
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return any(is_a(found) for is_a in lists) and _is_readable(
            found.value_type, kind.value_type
        )
    if pa.types.is_struct(kind):
        return (
            pa.types.is_struct(found)
            and [each.name for each in found] == [each.name for each in kind]
            and all(
                _is_readable(one.type, other.type) for one, other in zip(found, kind, strict=True)
            )
        )
    if pa.types.is_binary(kind) and pa.types.is_fixed_size_binary(found):
        return True
    return bool(found.equals(kind)) or found in _READ_AS.get(kind, ())


def _as(kind: pa.DataType, values: pa.Array) -> pa.Array:
    """Values as Spark reads them; files may say that they were fixed-size lists, for example."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    return values if values.type.equals(kind) else values.cast(kind)


class WholeFiles:
    """Reads whole files.

    Args:
        names: of the columns that are to hold them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def read(self, places: pa.StructArray) -> Iterator[dict[str, pa.Array]]:
        """Read the files of some rows.

        Args:
            places: structs of ``path``, as Spark's metadata write it.

        Yields:
            The columns of some of the rows at a time, in the order of ``places``.

        Raises:
            DataError: a file cannot be read.
        """
        contents: list[bytes] = []
        size = 0
        for url in places.field(PATH).to_pylist():
            content = self._content(url)
            if contents and size + len(content) > PIECE_BYTES:
                yield self._columns(contents)
                contents, size = [], 0
            contents.append(content)
            size += len(content)
        if contents:
            yield self._columns(contents)

    def _columns(self, contents: list[bytes]) -> dict[str, pa.Array]:
        return dict.fromkeys(self._names, pa.array(contents, pa.binary()))

    def _content(self, url: str) -> bytes:
        try:
            path = Path(path_of(url))
            size = path.stat().st_size
            content = path.read_bytes() if size <= MAX_BYTES else b""
        except OSError as error:
            raise DataError(
                f"{url} could not be read: {error}. Spark found it when the DataFrame was made: "
                "read the folder again if files in it come and go"
            ) from error
        if max(size, len(content)) > MAX_BYTES:
            raise DataError(
                f"{url} has more than {MAX_BYTES:,} bytes, the most that a row may have"
            )
        return content
