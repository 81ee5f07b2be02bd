"""Rows of unequal length that workers exchange, and lengths that no worker tells."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from exchanges import by_rank, exchanged, part
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.feed.columns.ragged import Ragged
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.reshuffle import RowServer, server
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

pytestmark = pytest.mark.usefixtures("nobody_stays")

SPECS = (
    ColumnSpec("tokens", torch.int32, (UNKNOWN,), padding=Padding(0)),
    ColumnSpec("id", torch.int64),
    ColumnSpec("events", torch.float32, (UNKNOWN, 2), padding=Padding(0)),
)


def counts_of(ids: np.ndarray) -> np.ndarray:
    return ids * 7 % 11 % 6


def sequences(ids: np.ndarray) -> list[list[int]]:
    """The tokens of row i: i, i + 1, ..., of some rows none."""
    return [[i + k for k in range(count)] for i, count in zip(ids, counts_of(ids), strict=True)]


def columns_of(numbers: Tensor) -> list[Any]:
    ids = numbers.numpy()
    counts = torch.from_numpy(counts_of(ids))
    tokens = torch.tensor([n for row in sequences(ids) for n in row], dtype=torch.int32)
    events = torch.from_numpy(np.repeat(ids, counts_of(ids) + 1)[:, None] * [1.0, -1.0]).float()
    return [Ragged(tokens, counts), torch.from_numpy(ids), Ragged(events, counts + 1)]


def test_rows_of_unequal_length_travel_whole_in_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHUNK_BYTES", 999)
    monkeypatch.setattr(server, "LENGTHS_AT_ONCE", 100)
    monkeypatch.setattr("sparkdl.reshuffle.exchange.LENGTHS_AT_ONCE", 100)
    ranks = exchanged(tmp_path, [1700, 0, 1], SPECS, columns_of)
    ids = np.concatenate([each[1].numpy() for each in ranks])
    assert sorted(ids) == list(range(1701))
    for tokens, ids, events in ranks:
        wanted = columns_of(ids)
        for found, expected in ((tokens, wanted[0]), (events, wanted[2])):
            assert torch.equal(found.values, expected.values)
            assert torch.equal(found.lengths, expected.lengths)
    again = exchanged(tmp_path, [1700, 0, 1], SPECS, columns_of)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(ranks, again, strict=True))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30))
def test_both_ends_cut_the_same_chunks_that_begin_within_the_size(lengths: list[int]) -> None:
    spec = ColumnSpec("x", torch.float64, (UNKNOWN, 100), padding=Padding(0))
    counts = torch.tensor(lengths)
    sizes = server.chunk_sizes(len(lengths), [spec], [counts])
    assert sum(sizes) == len(lengths)
    assert min(sizes) > 0
    for chunk in torch.split(counts, sizes):
        assert int(chunk[:-1].sum()) * 800 <= server.CHUNK_BYTES


@every(
    ("lengths", "words"),
    [
        ([-1, 5], "rows with -1 to 5 items in column 'tokens'"),
        ([0, 1 << 40], "rows with 0 to 1099511627776 items"),
    ],
)
def test_lengths_that_no_row_has_are_refused(
    tmp_path: Path, lengths: list[int], words: str
) -> None:
    """Rank 1 has four rows, and gives two of them to rank 0."""
    shapes = [list(spec.row_shape) for spec in SPECS]
    left = threading.Event()

    def lie(connection: Connection) -> None:
        connection.receive_header()
        connection.send_header({"rows": 2, "shapes": shapes})
        for _ in range(2):
            connection.send_values(torch.tensor(lengths))
        left.wait(20)

    port = Port("127.0.0.1", "secret", lie, encrypted=False)
    new = PartitionStore(tmp_path)
    try:
        with RowServer("127.0.0.1", "secret", 20.0) as own:
            everyone = Everyone(by_rank([0, 4]), [own.address, ["127.0.0.1", port.number, None]])
            with pytest.raises(TrainingError, match=words):
                part(0, own, lambda: everyone, SPECS)(PartitionStore(tmp_path), None, new, 1)
    finally:
        left.set()
        port.close()
        new.close()
