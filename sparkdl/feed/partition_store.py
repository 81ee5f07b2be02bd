"""The partition store: a worker's rows on its own host, in memory-mapped files.

Rows are appended as tensors while Spark delivers them and mapped afterwards, so data larger than
memory works and random rows are one gather from the page cache. A column is one contiguous tensor
in its final dtype; numbers of the same dtype lie side by side in one, and so do arrays where they
are many. Rows of unequal length are two files.

The files have no name: they are unlinked when created, so a crash leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdl.feed.schema import Column
from sparkdl.feed.stored_rows import StoredRows, StoredSequences
from sparkdl.protocols import ColumnSpec

MOST_ALONE = 64
"""The most columns of arrays that have a file each: one opens it, one maps it, in each store."""


class PartitionStore:
    """Append rows once, then read them in any order.

    Args:
        directory: where to put the files; must have room for the rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._specs: tuple[ColumnSpec, ...] = ()
        # Which columns lie together, and the StoredRows or StoredSequences that they lie in.
        self._groups: list[tuple[list[int], Any]] = []
        self.rows = 0

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes, on average if rows are of unequal length."""
        return sum(stored.row_bytes(self.rows) for _, stored in self._groups)

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
        for columns, stored in self._groups:
            packed.append(stored.pack([batch[index] for index in columns]))
            stored.append(packed[-1])
        self.rows += len(batch[0])
        return packed

    def flush(self) -> None:
        """Write the last of the rows that were appended; it happens by itself when they are read.

        Raises:
            TrainingError: there is no room for them.
        """
        for _, stored in self._groups:
            stored.flush()

    def create(self, specs: Sequence[ColumnSpec], rows: int) -> None:
        """Make room for rows that are written in any order.

        Args:
            specs: what the columns are.
            rows: how many there will be.
        """
        self._specs = tuple(specs)
        self._groups, groups = [], dict[object, list[int]]()
        many = sum(bool(spec.row_shape) for spec in specs) > MOST_ALONE
        for index, spec in enumerate(specs):
            together = spec.padding is None and (many or not spec.row_shape)
            groups.setdefault(spec.dtype if together else index, []).append(index)
        for columns in groups.values():
            first = specs[columns[0]]
            if first.padding is None:
                chosen = [specs[index] for index in columns]
                self._groups.append((columns, StoredRows(self._directory, *chosen)))
            else:
                self._groups.append((columns, StoredSequences(self._directory, first)))
        self.rows = rows

    def write(self, packed: Sequence[Column], first: int) -> None:
        """Write rows as ``take_packed`` gives them; several threads may, each its own rows.

        Args:
            packed: as ``take_packed`` gives them, n rows.
            first: the position of the first of them.
        """
        for (_, stored), values in zip(self._groups, packed, strict=True):
            stored.write(values, first)

    def empty_packed(self, rows: int, lengths: Sequence[Tensor] = ()) -> list[Column]:
        """Room to receive rows in, as ``take_packed`` gives them.

        Args:
            rows: how many.
            lengths: of the rows of each column of unequal lengths, shape (rows,), int64.
        """
        known = iter(lengths)
        return [stored.empty(rows, known) for _, stored in self._groups]

    def lengths(self, rows: Tensor | None = None) -> list[Tensor]:
        """How many items rows have.

        Args:
            rows: which ones, shape (n,), int64; None for all.

        Returns:
            For each column of unequal lengths, in the order of ``take_packed``, shape (n,), int64.
        """
        sequences = (stored for _, stored in self._groups if isinstance(stored, StoredSequences))
        return [stored.lengths(rows, self.rows) for stored in sequences]

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
        for (columns, stored), gathered in zip(self._groups, packed, strict=True):
            for index, values in zip(columns, stored.unpack(gathered, pinned=pinned), strict=True):
                taken[index] = values
        return taken

    def take_packed(self, rows: Tensor, *, pinned: bool = False) -> list[Column]:
        """Copy rows in any order, the columns as they lie in the files.

        Args:
            rows: which ones, shape (n,), int64.
            pinned: whether the copies are to lie in pinned memory.

        Returns:
            One tensor per file, shape (n, ...); of a column of unequal lengths its ragged rows.
        """
        return [stored.take(rows, pinned=pinned) for _, stored in self._groups]

    def close(self) -> None:
        """Give the disk space back."""
        for _, stored in self._groups:
            stored.close()
        self._groups = []
