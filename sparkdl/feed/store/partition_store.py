"""The partition store: a worker's rows on its own host, in memory-mapped files.

Rows are appended as tensors while Spark delivers them and mapped afterwards, so data larger than
memory works and random rows are one gather from the page cache. A column is one contiguous tensor
in its final dtype, and numbers of the same dtype lie side by side in one. Rows of unequal length
are two files (``sequences.py``).

The files have no name: they are unlinked when created, so a crash leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column
from sparkdl.feed.store.rows import (
    StoredColumn,
    StoredRows,
    StoredSequences,
    specs_of_files,
)
from sparkdl.protocols import ColumnSpec


class PartitionStore:
    """Append rows once, then read them in any order.

    Args:
        directory: where to put the files; must have room for the rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._specs: tuple[ColumnSpec, ...] = ()
        self._groups: list[_Stored] = []
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
            batch: one per column, in the column's dtype: a tensor of shape (n, *row_shape), or
                ragged where the column is to be padded.

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
        """Write rows as ``take_packed`` gives them; several threads may, each its own rows.

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
        return [group.lengths(rows, self.rows) for group in sequences]

    def take(self, rows: Tensor, *, pinned: bool = False) -> list[Column]:
        """Copy rows in any order.

        Args:
            rows: which ones, shape (n,), int64.
            pinned: whether the copies are to lie in pinned memory, from where a GPU fetches them.

        Returns:
            One per column: a tensor of shape (n, *row_shape), or ragged; none in a store without
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
            One tensor per file, shape (n, ...); of a column of unequal lengths its ragged rows.
        """
        return [group.take(rows, pinned=pinned) for group in self._groups]

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
    def take(self, rows: Tensor, *, pinned: bool) -> Any: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


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
