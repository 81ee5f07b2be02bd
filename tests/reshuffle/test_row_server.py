"""Who may have rows of a worker, and what they cost it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every

from sparkdl.errors import DisconnectedError
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowServer
from sparkdl.reshuffle.server import Offer
from sparkdl.transport.connecting import introduced
from sparkdl.transport.connection import Connection

pytestmark = pytest.mark.usefixtures("nobody_stays")

COUNTS = np.array([[2, 3]])


def ids(directory: Path) -> PartitionStore:
    store = PartitionStore(directory)
    store.append((ColumnSpec("id", torch.int64),), [torch.arange(5)])
    return store


def offer(directory: Path, *, keep: bool) -> Offer:
    return Offer(ids(directory), None, COUNTS, [(1, 1, 0)], keep=keep)


@contextmanager
def asking(server: RowServer, header: Any) -> Iterator[Connection]:
    """A connection to the server on which a header was sent."""
    host, port, fingerprint = server.address
    connection = introduced(1, "rank 0", (host, port), "secret", fingerprint, 5.0)
    try:
        connection.send_header(header)
        yield connection
    finally:
        connection.close()


def fetched(server: RowServer, rank: int, epoch: int = 1) -> list[int]:
    with asking(server, {"rows_for": rank, "epoch": epoch}) as connection:
        answer = connection.receive_header()
        rows = torch.zeros(answer["rows"], dtype=torch.int64)
        connection.receive_values(rows.view(torch.uint8))
        connection.send_header({"taken": True})
        with pytest.raises(DisconnectedError):
            connection.receive_header()
        return rows.tolist()


def test_every_row_goes_to_one_rank_which_can_fetch_it_again_if_it_is_kept(tmp_path: Path) -> None:
    with RowServer("127.0.0.1", "secret", 20.0) as server:
        server.offer(1, offer(tmp_path, keep=True))
        first, again = ([fetched(server, 0), fetched(server, 1)] for _ in range(2))
    assert sorted(first[0] + first[1]) == list(range(5))
    assert again == first


def test_rows_that_are_not_kept_take_no_room_once_everybody_has_them(tmp_path: Path) -> None:
    given = offer(tmp_path, keep=False)
    given.taken(0)
    assert given.store.row_bytes == 8
    given.taken(1)
    assert given.store.row_bytes == 0


def test_who_comes_early_waits_until_there_are_rows(tmp_path: Path) -> None:
    with RowServer("127.0.0.1", "secret", 20.0) as server:
        with asking(server, {"rows_for": 1, "epoch": 3}) as connection:
            assert connection.receive_header() == {"waiting": True}
            server.offer(3, offer(tmp_path, keep=False))
            while "waiting" in (answer := connection.receive_header()):
                pass
        assert answer == {"rows": 3, "shapes": [[]]}


def test_a_server_that_closes_keeps_nobody_waiting(tmp_path: Path) -> None:
    server = RowServer("127.0.0.1", "secret", 20.0)
    with asking(server, {"rows_for": 1, "epoch": 3}) as connection:
        closing = threading.Timer(0.2, server.close)
        closing.start()
        with pytest.raises(DisconnectedError):
            connection.receive_header()  # who waits is told so after a second only
        closing.join(60)


@every(
    ("header", "why"),
    [
        ({}, "is not a request for rows"),
        ({"rows_for": "1", "epoch": 1}, "is not a request for rows"),
        ({"rows_for": True, "epoch": 1}, "is not a request for rows"),
        ({"rows_for": 1}, "is not a request for rows"),
        ({"rows_for": 1, "epoch": -1}, "is not a request for rows"),
        ({"rows_for": [1] * 100_000, "epoch": 1}, "is not a request for rows"),
        ({"rows_for": 2, "epoch": 1}, "there is no rank 2"),
        ({"rows_for": -1, "epoch": 1}, "there is no rank -1"),
    ],
)
def test_who_asks_for_what_is_not_there_is_refused_in_words(
    tmp_path: Path, header: Any, why: str
) -> None:
    with RowServer("127.0.0.1", "secret", 20.0) as server:
        server.offer(1, offer(tmp_path, keep=False))
        with asking(server, header) as connection:
            refused = connection.receive_header()["refused"]
            assert why in refused
            assert len(refused) < 200
        assert len(fetched(server, 1)) == 3


def test_who_asks_for_an_exchange_that_never_comes_is_left_after_the_deadline() -> None:
    with (
        RowServer("127.0.0.1", "secret", 0.5) as server,
        asking(server, {"rows_for": 1, "epoch": 7}) as connection,
    ):
        assert connection.receive_header() == {"waiting": True}
        with pytest.raises(DisconnectedError):
            connection.receive_header()
