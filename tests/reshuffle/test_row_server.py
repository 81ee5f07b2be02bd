"""What a worker serves to others: rows of its partitions, and refusals."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every_row
from exchanges import part
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import DisconnectedError
from sparkdl.feed.column_statistics import places_from
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.packed import ORDER_COLUMN, PLACE_COLUMN
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import Offer
from sparkdl.transport.connecting import ServiceAddress
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
    address = ServiceAddress(host, port, "secret", fingerprint)
    with closing(address.connect(1, "rank 0", 5.0)) as connection:
        connection.send_header(header)
        yield connection


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


@every_row(
    ({}, "is not a request for rows"),
    ({"rows_for": "1", "epoch": 1}, "is not a request for rows"),
    ({"rows_for": True, "epoch": 1}, "is not a request for rows"),
    ({"rows_for": 1}, "is not a request for rows"),
    ({"rows_for": 1, "epoch": -1}, "is not a request for rows"),
    ({"rows_for": [1] * 100_000, "epoch": 1}, "is not a request for rows"),
    ({"rows_for": 2, "epoch": 1}, "there is no rank 2"),
    ({"rows_for": -1, "epoch": 1}, "there is no rank -1"),
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


SCHEMA = FeedSchema(
    (ColumnSpec("x", torch.float64),),
    ColumnSpec("id", torch.int64),
    weight=ColumnSpec("w", torch.float64),
    validation=ColumnSpec("held", torch.bool),
)


def a_partition(number: int, ids: Sequence[int]) -> dict[str, Any]:
    x = np.array(ids, np.float64)
    return {
        "x": x,
        "id": np.array(ids, np.int64),
        "w": 1 / (x + 3),
        "held": np.array(ids, np.int64) % 4 == 0,
        PLACE_COLUMN: places_from(number, 0, len(ids)),
    }


def batches(partitions: Sequence[dict[str, Any]], *, draws: Any) -> list[pa.RecordBatch]:
    """Record batches that begin anywhere; with draws rows come mixed, as a shuffle sends them."""
    if not partitions:
        return []
    whole = {name: np.concatenate([p[name] for p in partitions]) for name in partitions[0]}
    if draws is not None:
        mixed = draws.permutation(len(whole["id"]))
        whole = {name: values[mixed] for name, values in whole.items()}
        # The positions of a partition's rows are not those of another run either.
        whole[PLACE_COLUMN] = whole[PLACE_COLUMN] >> 33 << 33
        whole[ORDER_COLUMN] = pa.nulls(len(mixed))
    return pa.table(whole).combine_chunks().to_batches(max_chunksize=7)


def trained(partitions: list[dict[str, Any]], readers: list[list[int]], *, draws: Any) -> Any:
    """What each rank trains on and validates with, and the mean weight."""
    options = FeedOptions(exchange_rows=True, reshuffle_every=1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        of_rank = partial(
            Feed, SCHEMA, batch_size=3, seed=5, directory=Path(folder), options=options
        )
        feeds = [stack.enter_context(of_rank(rank=rank)) for rank in range(len(readers))]
        shards = [
            feed.fill(batches([partitions[number] for number in numbers], draws=draws))
            for feed, numbers in zip(feeds, readers, strict=True)
        ]
        found = DataStatistics.of(shards)
        servers = [stack.enter_context(RowServer("127.0.0.1", "secret", 20.0)) for _ in feeds]
        addresses = [server.address for server in servers]

        def exchange(rank: int) -> list[list[int]]:
            feed = feeds[rank]
            everyone = partial(Everyone.of, found.parts, addresses)
            training, validating = (
                part(rank, servers[rank], partial(everyone, held_out=held_out), SCHEMA.stored)
                for held_out in (False, True)
            )
            seen = []
            for epoch in (1, 2):
                feed.reshuffle(epoch, training)
                seen.append([int(i) for batch in feed.epoch(epoch) for i in batch.targets])
            feed.exchange_held_out(validating)
            return [*seen, [int(i) for batch in feed.held_out() for i in batch.targets]]

        with ThreadPoolExecutor(len(feeds)) as pool:
            seen = list(pool.map(exchange, range(len(feeds)), timeout=60))
    return seen, found.mean_weight, found.lasting()


@pytest.mark.parametrize("shuffled", [False, True])
@settings(max_examples=8)
@given(data=st.data())
def test_whoever_reads_a_partition_each_has_the_same_rows_in_the_same_order(
    shuffled: bool, data: Any
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=7))
    ranks = data.draw(st.integers(1, 4))
    starts = np.cumsum([0, *sizes])
    partitions = [
        a_partition(number, range(starts[number], starts[number] + size))
        for number, size in enumerate(sizes)
    ]
    draws = np.random.default_rng(data.draw(st.integers(0, 99))) if shuffled else None
    found = []
    for _ in range(2):
        readers: list[list[int]] = [[] for _ in range(ranks)]
        for number in data.draw(st.permutations(range(len(sizes)))):
            readers[data.draw(st.integers(0, ranks - 1))].append(number)
        found.append(trained(partitions, readers, draws=draws))
    assert repr(found[0]) == repr(found[1])
    seen, _, _ = found[0]
    for epoch in (0, 1):
        ids = [i for of_rank in seen for i in of_rank[epoch]]
        assert sorted(ids) == [i for i in range(starts[-1]) if i % 4]
        counts = [len(of_rank[epoch]) for of_rank in seen]
        assert max(counts) - min(counts) <= 1
    assert sorted(i for of_rank in seen for i in of_rank[2]) == list(range(0, starts[-1], 4))
