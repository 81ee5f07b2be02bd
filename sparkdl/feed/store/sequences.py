"""Rows of unequal length in the partition store: a file of values, and one of where each row is.

The second has where the row's values begin, and how many they are: Arrow's list views in two files.
So rows may come in any order, and one is found without a walk over those before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Ragged, items_of
from sparkdl.feed.store.rows import StoredColumn, StoredRows
from sparkdl.protocols import ColumnSpec

PLACE = 2
"""Numbers that say where a row is: its first item, and how many it has."""


class StoredSequences:
    """One column of rows of unequal length, as ``StoredRows`` has rows of equal shape.

    Args:
        column: which.
        values: an empty file of items.
        places: an empty file of pairs of int64.
    """

    def __init__(self, column: StoredColumn, values: StoredRows, places: StoredRows) -> None:
        self.columns: tuple[StoredColumn, ...] = (column,)
        self._values = values
        self._places = places
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

    def empty(self, rows: int, lengths: Tensor | None) -> Ragged:
        """Room for rows of these lengths."""
        if lengths is None:
            lengths = torch.zeros(rows, dtype=torch.int64)
        values = self._values.empty(int(lengths.sum()), None)
        return Ragged(values, lengths)

    def lengths(self, rows: Tensor | None, stored: int, pages: int | None) -> Tensor:
        """Items of rows, of all where none are named; shape (n,), int64."""
        chosen = torch.arange(stored) if rows is None else rows
        places = self._places.take(chosen, stored, pages, pinned=False)
        return _copied(places[:, 1])

    def take(self, rows: Tensor, stored: int, pages: int | None, *, pinned: bool) -> Ragged:
        """Copy rows, with no more than so many pages mapped at a time if that is limited."""
        places = self._places.take(rows, stored, pages, pinned=False)
        if pages is not None:
            self._places.unmap()
        starts, lengths = places[:, 0], _copied(places[:, 1])
        items = items_of(starts, lengths)
        return Ragged(self._values.take(items, self._items, pages, pinned=pinned), lengths)

    def flush(self) -> None:
        """Write what is left over."""
        self._values.flush()
        self._places.flush()

    def unmap(self) -> None:
        """Forget which pages were mapped."""
        self._values.unmap()
        self._places.unmap()

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


def specs_of_files(spec: ColumnSpec) -> tuple[ColumnSpec, ColumnSpec]:
    """What the two files of a column hold: its items, and the places of its rows."""
    return (
        ColumnSpec(spec.name, spec.dtype, spec.item_shape),
        ColumnSpec(f"{spec.name}: first item and number of items", torch.int64, (PLACE,)),
    )
