"""Rows in the partition store.

Rows of equal shape: columns that lie side by side in one file. Rows of unequal length: a file of
values, and one of where each row's values begin, and how many they are: Arrow's list views in two
files. So rows may come in any order, and one is found without a walk over those before it.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.feed.schema import Ragged, items_of
from sparkdl.protocols import ColumnSpec

PAGE_BYTES = 2 << 20
"""The kernel's huge pages."""


class StoredRows:
    """Columns of one dtype that lie side by side in one file.

    Args:
        directory: where to put the file.
        specs: the columns, of known shapes.

    Raises:
        TrainingError: it cannot be made.
    """

    def __init__(self, directory: Path, *specs: ColumnSpec) -> None:
        self.dtype = specs[0].dtype
        self._shapes = [spec.row_shape for spec in specs]
        self._widths = [spec.elements or 0 for spec in specs]
        width = sum(self._widths)
        self.row_shape = (width,) if len(specs) > 1 else specs[0].row_shape
        self._row_bytes = self.dtype.itemsize * width
        self._directory = directory
        self._file = _unnamed_file(directory)
        self._written = 0
        self._tail = bytearray()
        """What was appended and is not in the file yet."""
        self._row_kind = np.dtype((np.void, self._row_bytes))
        self._stored_rows: np.ndarray | None = None
        self._mapping = threading.Lock()

    def row_bytes(self, rows: int) -> int:
        """Bytes that a row takes, whatever their number."""
        return self._row_bytes

    def empty(self, rows: int, lengths: object = None) -> Tensor:
        """Room for rows."""
        return torch.empty((rows, *self.row_shape), dtype=self.dtype)

    def pack(self, columns: Sequence[Tensor]) -> Tensor:
        """Put columns side by side."""
        if len(columns) == 1:
            return columns[0]
        if not any(self._shapes):  # twice as fast as torch.stack(columns, dim=1)
            return torch.stack(list(columns)).t().contiguous()
        flat = [each.reshape(len(each), n) for each, n in zip(columns, self._widths, strict=True)]
        return torch.cat(flat, dim=1)

    def unpack(self, packed: Tensor, *, pinned: bool) -> list[Tensor]:
        """Take them apart."""
        if len(self._shapes) == 1:
            return [packed]
        if not any(self._shapes):
            turned = (len(self._shapes), len(packed))
            apart = torch.empty(turned, dtype=self.dtype, pin_memory=pinned)
            return list(apart.copy_(packed.t()).unbind(0))
        columns = []
        for part, shape in zip(torch.split(packed, self._widths, 1), self._shapes, strict=True):
            whole = torch.empty((len(packed), *shape), dtype=self.dtype, pin_memory=pinned)
            columns.append(whole.copy_(part.view(whole.shape)))
        return columns

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
        self._put([_bytes_of(values)], first * self._row_bytes)

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
            f"{os.fstat(self._file.fileno()).st_size >> 20} MiB of them are stored, {missing} "
            f"bytes could not be written, {system.f_bavail * system.f_frsize >> 20} MiB are free "
            f"({error.strerror}). Give it more space, use more hosts, or change storeIn"
        )

    def take(self, rows: Tensor, *, pinned: bool) -> Tensor:
        """Copy rows."""
        out = torch.empty((len(rows), *self.row_shape), dtype=self.dtype, pin_memory=pinned)
        if not out.numel():
            return out
        # Rows of 64 bytes come 1.6 times as fast as by torch.index_select, long ones equally
        # fast; "clip" is the mode that writes to ``out`` directly. Each row is one item.
        taken = out.view(-1).view(torch.uint8).numpy().view(self._row_kind)
        np.take(self._map(), rows.numpy(), out=taken, mode="clip")
        return out

    def close(self) -> None:
        """Give the disk space back."""
        self._stored_rows = None
        self._file.close()

    def _map(self) -> np.ndarray:
        """The rows as they lie in the file, which its first reader completes and maps."""
        if self._stored_rows is None:
            # The first readers are often several: workers that fetch their rows at once.
            with self._mapping:
                if self._stored_rows is None:
                    self.flush()
                    mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._stored_rows = np.frombuffer(mapped, self._row_kind)
        return self._stored_rows


def _unnamed_file(directory: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        remedy = "Let the executors write there, or change storeIn"
        if error.errno == errno.EMFILE:
            remedy = "Raise their limit (ulimit -n), or pad fewer columns: each is two files"
        raise TrainingError(
            f"a worker cannot make a file for its rows in {directory} on {socket.gethostname()} "
            f"({error.strerror}). {remedy}"
        ) from error


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


class StoredSequences:
    """One column of rows of unequal length, as ``StoredRows`` has rows of equal shape.

    Args:
        directory: where to put the files.
        spec: the column.
    """

    def __init__(self, directory: Path, spec: ColumnSpec) -> None:
        self._values = StoredRows(directory, ColumnSpec(spec.name, spec.dtype, spec.item_shape))
        # Of each row its first item, and how many it has.
        self._places = StoredRows(directory, ColumnSpec(spec.name, torch.int64, (2,)))
        self._items = 0
        self._room = threading.Lock()

    def row_bytes(self, rows: int) -> int:
        """Bytes that a row takes on average, of so many."""
        items = -(-self._items * self._values.row_bytes(0) // max(1, rows))
        return self._places.row_bytes(0) + items

    def pack(self, columns: Sequence[Ragged]) -> Ragged:
        """The column itself: it lies in files of its own."""
        return columns[0]

    def unpack(self, packed: Ragged, *, pinned: bool) -> list[Ragged]:
        """The same."""
        return [packed]

    def append(self, values: Ragged) -> None:
        """Write rows behind those that were appended before."""
        self._places.append(self._places_of(values, self._take_room(values)))
        self._values.append(values.values)

    def write(self, values: Ragged, first: int) -> None:
        """Write rows to a place of their own; their items lie as they come."""
        first_item = self._take_room(values)
        self._values.write(values.values, first_item)
        self._places.write(self._places_of(values, first_item), first)

    def empty(self, rows: int, lengths: Iterator[Tensor]) -> Ragged:
        """Room for rows of the next lengths."""
        known = next(lengths, torch.zeros(rows, dtype=torch.int64))
        return Ragged(self._values.empty(int(known.sum())), known)

    def lengths(self, rows: Tensor | None, stored: int) -> Tensor:
        """Items of rows, of all where none are named; shape (n,), int64."""
        chosen = torch.arange(stored) if rows is None else rows
        places = self._places.take(chosen, pinned=False)
        return _copied(places[:, 1])

    def take(self, rows: Tensor, *, pinned: bool) -> Ragged:
        """Copy rows."""
        places = self._places.take(rows, pinned=False)
        starts, lengths = places[:, 0], _copied(places[:, 1])
        items = items_of(starts, lengths)
        return Ragged(self._values.take(items, pinned=pinned), lengths)

    def flush(self) -> None:
        """Write what is left over."""
        self._values.flush()
        self._places.flush()

    def close(self) -> None:
        """Give the disk space back."""
        self._values.close()
        self._places.close()

    def _take_room(self, rows: Ragged) -> int:
        """The place of the first item, for rows that nobody else puts there."""
        with self._room:
            first_item, self._items = self._items, self._items + len(rows.values)
        return first_item

    @staticmethod
    def _places_of(rows: Ragged, first_item: int) -> Tensor:
        starts = rows.lengths.cumsum(0) - rows.lengths + first_item
        return torch.stack([starts, rows.lengths], dim=1)


def _copied(numbers: Tensor) -> Tensor:
    """The same in memory of their own: one number of a pair counts as contiguous, but is not."""
    return torch.empty(len(numbers), dtype=numbers.dtype).copy_(numbers)
