"""The partition store: a worker's rows on its own host, in memory-mapped Arrow IPC files.

Rows are appended as tensors while Spark delivers them and mapped afterwards, so data larger than
memory works and random rows are one gather from the page cache. A column is one contiguous tensor
in its final dtype, and numbers of the same dtype lie side by side in one. Rows of unequal length
are two files (``sequences.py``). Each file has one record batch: more would leave a column in
pieces, and a gather over pieces walks them.

The files have no name: they are unlinked when created, so a crash leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.feed.arrow_file import ArrowFrame, stored_values
from sparkdl.feed.ragged import Column
from sparkdl.feed.sequences import StoredSequences, specs_of_files
from sparkdl.protocols import ColumnSpec

PAGE_BYTES = 2 << 20
"""The most that one access may map: the kernel's huge pages."""


class PartitionStore:
    """Append rows once, then read them in any order.

    Args:
        directory: where to put the files; must have room for the rows.
        resident_bytes: how much of the files may be mapped at a time; None leaves that to the
            kernel, which takes mapped pages back when memory gets short.
    """

    def __init__(self, directory: Path, *, resident_bytes: int | None = None) -> None:
        self._directory = directory
        self._resident_bytes = resident_bytes
        self._specs: tuple[ColumnSpec, ...] = ()
        self._groups: list[_Stored] = []
        self._mapping = threading.Lock()
        self.rows = 0

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes, on average if rows are of unequal length."""
        return sum(group.row_bytes(self.rows) for group in self._groups)

    @property
    def specs(self) -> tuple[ColumnSpec, ...]:
        """What the columns are; none before the first rows."""
        return self._specs

    def append(self, specs: Sequence[ColumnSpec], batch: Sequence[Column]) -> list[Column]:
        """Add rows.

        Args:
            specs: what the columns are, the same at every call.
            batch: one a column, in the column's dtype: a tensor of shape (n, *row_shape), or ragged
                where the column is to be padded.

        Returns:
            The same rows as ``take_packed`` gives them.

        Raises:
            TrainingError: there is no room for them.
        """
        if not self._groups:
            self.create(specs, 0)
        packed = []
        for group in self._groups:
            packed.append(group.pack([batch[column.index] for column in group.columns]))
            group.append(packed[-1])
        self.rows += len(batch[0])
        return packed

    def flush(self) -> None:
        """Write the last of the rows that were appended; it happens by itself when they are read.

        Raises:
            TrainingError: there is no room for them.
        """
        for group in self._groups:
            group.flush()

    def create(self, specs: Sequence[ColumnSpec], rows: int) -> None:
        """Make room for rows that are written in any order.

        Args:
            specs: what the columns are.
            rows: how many there will be.
        """
        self._specs = tuple(specs)
        self._groups = [_stored(columns, self._directory) for columns in _grouped(specs)]
        self.rows = rows

    def write(self, packed: Sequence[Column], first: int) -> None:
        """Write rows as ``take_packed`` gives them; from several threads at once if they differ.

        Args:
            packed: as ``take_packed`` gives them, n rows.
            first: the position of the first of them.
        """
        for group, values in zip(self._groups, packed, strict=True):
            group.write(values, first)

    def empty_packed(self, rows: int, lengths: Sequence[Tensor] = ()) -> list[Column]:
        """Room to receive rows in, as ``take_packed`` gives them.

        Args:
            rows: how many.
            lengths: of the rows of each column of unequal lengths, shape (rows,), int64.
        """
        known = iter(lengths)
        return [
            group.empty(rows, next(known, None) if isinstance(group, StoredSequences) else None)
            for group in self._groups
        ]

    def lengths(self, rows: Tensor | None = None) -> list[Tensor]:
        """How many items rows have.

        Args:
            rows: which ones, shape (n,), int64; None for all.

        Returns:
            For each column of unequal lengths, in the order of ``take_packed``, shape (n,), int64.
        """
        sequences = (group for group in self._groups if isinstance(group, StoredSequences))
        pages = self._pages()
        with self._alone(pages):
            return [group.lengths(rows, self.rows, pages) for group in sequences]

    def slice(self, start: int, stop: int) -> list[Column]:
        """Copy rows that follow each other.

        Returns:
            As ``take`` does.
        """
        return self.take(torch.arange(start, stop))

    def take(self, rows: Tensor, *, pinned: bool = False) -> list[Column]:
        """Copy rows in any order.

        Args:
            rows: which ones, shape (n,), int64.
            pinned: whether the copies are to lie in pinned memory, from where a GPU fetches them.

        Returns:
            One a column: a tensor of shape (n, *row_shape), or ragged; none in a store without
            columns.
        """
        taken: list[Column] = [torch.empty(0)] * len(self._specs)
        packed = self.take_packed(rows, pinned=pinned)
        for group, gathered in zip(self._groups, packed, strict=True):
            apart = group.unpack(gathered, pinned=pinned)
            for column, values in zip(group.columns, apart, strict=True):
                taken[column.index] = values
        return taken

    def take_packed(self, rows: Tensor, *, pinned: bool = False) -> list[Column]:
        """Copy rows in any order, the columns as they lie in the files.

        Args:
            rows: which ones, shape (n,), int64.
            pinned: whether the copies are to lie in pinned memory.

        Returns:
            One tensor a file, shape (n, ...); of a column of unequal lengths its ragged rows.
        """
        pages = self._pages()
        packed: list[Column] = []
        with self._alone(pages):
            for group in self._groups:
                packed.append(group.take(rows, self.rows, pages, pinned=pinned))
                if pages is not None:
                    group.unmap()
        return packed

    def _pages(self) -> int | None:
        """How many pages may be mapped at a time; None for as many as there are."""
        limit = self._resident_bytes
        if limit is None or self.rows * self.row_bytes <= limit:
            return None
        return max(1, limit // PAGE_BYTES)

    def _alone(self, pages: int | None) -> AbstractContextManager[object]:
        """Several threads may read, one for each worker that fetches rows: together as much."""
        return nullcontext() if pages is None else self._mapping

    def close(self) -> None:
        """Give the disk space back."""
        for group in self._groups:
            group.close()
        self._groups = []


class _Stored(Protocol):
    """Columns as they lie in files; rows are tensors, or ragged, as ``pack`` gives them."""

    columns: tuple[StoredColumn, ...]

    def row_bytes(self, rows: int) -> int: ...
    def empty(self, rows: int, lengths: Any) -> Any: ...
    def pack(self, columns: Any) -> Any: ...
    def unpack(self, packed: Any, *, pinned: bool) -> Any: ...
    def append(self, values: Any) -> None: ...
    def write(self, values: Any, first: int) -> None: ...
    def take(self, rows: Tensor, stored: int, pages: int | None, *, pinned: bool) -> Any: ...
    def flush(self) -> None: ...
    def unmap(self) -> None: ...
    def close(self) -> None: ...


class StoredColumn:
    """One column's place among the store's columns."""

    def __init__(self, index: int, spec: ColumnSpec) -> None:
        self.index = index
        self.spec = spec


class StoredRows:
    """Columns that lie side by side in one file: one of any shape, or several of numbers.

    Args:
        columns: all of them.
        directory: where to put the file.
    """

    def __init__(self, columns: Sequence[StoredColumn], directory: Path) -> None:
        self.columns = tuple(columns)
        first = columns[0].spec
        self.dtype = first.dtype
        names = ", ".join(column.spec.name for column in columns)
        self.row_shape = first.row_shape if len(columns) == 1 else (len(columns),)
        self._row_bytes = self.dtype.itemsize * len(columns) * (first.elements or 0)
        # Rows of nothing are not stored.
        self._frame = ArrowFrame(names, self.dtype, self.row_shape) if self._row_bytes else None
        self._start = self._frame.start if self._frame is not None else 0
        self._directory = directory
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - closed in close()
        self._written = self._start
        self._tail = bytearray()
        """Of the rows that were appended, what is not in the file yet."""
        self._row_kind = np.dtype((np.void, self._row_bytes))
        self._mapped: mmap.mmap | None = None
        self._stored_rows: np.ndarray | None = None
        self._mapping = threading.Lock()

    def row_bytes(self, rows: int) -> int:
        """Bytes that a row takes, whatever their number."""
        return self._row_bytes

    def empty(self, rows: int, lengths: None) -> Tensor:
        """Room for rows."""
        return torch.empty((rows, *self.row_shape), dtype=self.dtype)

    def pack(self, columns: Sequence[Tensor]) -> Tensor:
        """Put columns side by side."""
        # Twice as fast as torch.stack(columns, dim=1).
        return columns[0] if len(columns) == 1 else torch.stack(list(columns)).t().contiguous()

    def unpack(self, packed: Tensor, *, pinned: bool) -> list[Tensor]:
        """Take them apart."""
        if len(self.columns) == 1:
            return [packed]
        shape = (len(self.columns), len(packed))
        apart = torch.empty(shape, dtype=self.dtype, pin_memory=pinned)
        return list(apart.copy_(packed.t()).unbind(0))

    def append(self, values: Tensor) -> None:
        """Write rows behind those that were appended before.

        The system keeps what is written at once, from one multiple of ``PAGE_BYTES`` to another, in
        huge pages: gathering long rows from them is a tenth faster. What is left over is written
        with what comes next.

        Raises:
            TrainingError: there is no room for them.
        """
        data = _bytes_of(values)
        end = self._written + len(self._tail) + len(data)
        complete = end - end % PAGE_BYTES - self._written - len(self._tail)
        if complete > 0:
            self._put([memoryview(self._tail), data[:complete]], self._written)
            self._written, self._tail = end - end % PAGE_BYTES, bytearray()
            data = data[complete:]
        self._tail += data

    def flush(self) -> None:
        """Write what is left over."""
        self._put([memoryview(self._tail)], self._written)
        self._written, self._tail = self._written + len(self._tail), bytearray()

    def write(self, values: Tensor, first: int) -> None:
        """Write rows to a place of their own.

        Raises:
            TrainingError: there is no room for them.
        """
        self._put([_bytes_of(values)], self._start + first * self._row_bytes)

    def _put(self, pieces: list[memoryview], position: int) -> None:
        while pieces:
            try:
                written = os.pwritev(self._file.fileno(), pieces, position)
            except OSError as error:
                missing = sum(piece.nbytes for piece in pieces)
                raise self._no_room(missing, error) from error
            position += written
            while pieces and written >= pieces[0].nbytes:
                written -= pieces.pop(0).nbytes
            if pieces:
                pieces[0] = pieces[0][written:]

    def _no_room(self, missing: int, error: OSError) -> TrainingError:
        system = os.statvfs(self._directory)
        return TrainingError(
            f"a worker's rows do not fit into {self._directory} on {socket.gethostname()}: "
            f"{os.fstat(self._file.fileno()).st_size >> 20} MiB of them are there, {missing} bytes "
            f"could not be written, {system.f_bavail * system.f_frsize >> 20} MiB are free "
            f"({error.strerror}). Give it more room, use more hosts, or change storeIn"
        )

    def take(self, rows: Tensor, stored: int, pages: int | None, *, pinned: bool) -> Tensor:
        """Copy rows, with no more than so many pages mapped at a time if that is limited."""
        out = torch.empty((len(rows), *self.row_shape), dtype=self.dtype, pin_memory=pinned)
        if not out.numel():
            return out
        stored_rows, taken, chosen = self._map(stored), self._raw(out), rows.numpy()
        if pages is None:
            # Rows of 64 bytes come 1.6 times as fast as by torch.index_select, long ones equally
            # fast; "clip" is the mode that writes to ``out`` directly.
            np.take(stored_rows, chosen, out=taken, mode="clip")
            return out
        # Page by page, so that each is mapped once however many of its rows are wanted.
        order = np.argsort(chosen, kind="stable")
        begins = np.diff(chosen[order] * self._row_bytes // PAGE_BYTES, prepend=-1) > 0
        for part in np.split(order, np.flatnonzero(begins)[pages::pages]):
            taken[part] = stored_rows[chosen[part]]
            self.unmap()
        return out

    def _raw(self, values: Tensor) -> np.ndarray:
        """The same memory, each row one item, shape (n,)."""
        raw: np.ndarray = values.view(-1).view(torch.uint8).numpy()
        return raw.view(self._row_kind)

    def unmap(self) -> None:
        """Forget which pages were mapped; the page cache still has them."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give the disk space back."""
        self._stored_rows = self._mapped = None
        self._file.close()

    def _map(self, stored: int) -> np.ndarray:
        """The rows as they lie in the file, which its first reader completes and maps."""
        if self._stored_rows is None:
            # The first readers are often several: workers that fetch their rows at once.
            with self._mapping:
                if self._stored_rows is None:
                    self.flush()
                    self._complete(stored)
                    self._mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._stored_rows = stored_values(self._mapped).view(self._row_kind)
        return self._stored_rows

    def _complete(self, stored: int) -> None:
        """Make a file of Arrow's of the rows that are there."""
        assert self._frame is not None
        try:
            self._frame.put_around(self._file.fileno(), stored)
        except OSError as error:
            raise self._no_room(self._start, error) from error


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def _stored(columns: Sequence[StoredColumn], directory: Path) -> _Stored:
    column = columns[0]
    if column.spec.padding is None:
        return StoredRows(columns, directory)
    files = (StoredColumn(0, spec) for spec in specs_of_files(column.spec))
    values, places = (StoredRows([each], directory) for each in files)
    return StoredSequences(column, values, places)


def _grouped(specs: Sequence[ColumnSpec]) -> list[list[StoredColumn]]:
    """Numbers by their dtype, every other column alone."""
    groups: dict[object, list[StoredColumn]] = {}
    for index, spec in enumerate(specs):
        key = index if spec.row_shape else spec.dtype
        groups.setdefault(key, []).append(StoredColumn(index, spec))
    return list(groups.values())
