"""Rows of unequal length in the partition store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import TOKENS, ragged

from sparkdl.feed.columns.ragged import Ragged
from sparkdl.feed.store.partition_store import PartitionStore


class TestStore:
    """Rows in two files: of values, and of where each row is."""

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=30),
        resident=st.sampled_from([None, 1, 3 << 20]),
        data=st.data(),
    )
    def test_rows_written_in_any_order_come_back(
        self, rows: list[list[float]], resident: int | None, data: st.DataObject
    ) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40))
        firsts = data.draw(st.permutations(range(0, len(rows), 3)))
        with tempfile.TemporaryDirectory() as name:
            store = PartitionStore(Path(name), resident_bytes=resident)
            store.create([TOKENS], len(rows))
            for first in firsts:
                store.write([ragged(rows[first : first + 3])], first)
            (column,) = store.take(torch.tensor(chosen, dtype=torch.int64))
            (counts,) = store.lengths()
            store.close()
        assert isinstance(column, Ragged)
        assert column.lengths.tolist() == [len(rows[k]) for k in chosen]
        assert column.values.tolist() == [number for k in chosen for number in rows[k]]
        assert counts.tolist() == [len(row) for row in rows]
