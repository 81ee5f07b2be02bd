"""One exchange of rows: what arrives, and what happens to who lies, leaves or keeps silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import exchanges
import numpy as np
import pytest
import torch
from every_row import every
from exchanges import SEED, by_rank
from torch import Tensor

from sparkdl.errors import CollectiveError, TrainingError
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle import RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import exchange_plan
from sparkdl.transport.connection import Connection
from sparkdl.transport.handshake import MAGIC
from sparkdl.transport.port import Port

pytestmark = pytest.mark.usefixtures("nobody_stays")

SPECS = (
    ColumnSpec("wide", torch.float32, (UNKNOWN,)),
    ColumnSpec("id", torch.int64),
    ColumnSpec("half", torch.bfloat16),
)
KNOWN = tuple(spec.of_length(3) for spec in SPECS)
SHAPES = [[3], [], []]


def columns_of(ids: Tensor) -> list[Tensor]:
    return [torch.stack([ids, ids * 2, ids * 3], dim=1).float(), ids, ids.bfloat16()]


def filled(directory: Path, ids: Tensor) -> PartitionStore:
    store = PartitionStore(directory)
    store.append(KNOWN, columns_of(ids))
    return store


exchanged = partial(exchanges.exchanged, specs=SPECS, columns_of=columns_of, known=KNOWN)
part = partial(exchanges.part, specs=SPECS)


@every("how", [{}, {"tls": True}])
def test_the_columns_of_a_row_travel_together_in_large_numbers(tmp_path: Path, how: Any) -> None:
    columns = exchanged(tmp_path, [300_000, 0, 1], **how)
    assert [len(ids) for _, ids, _ in columns] == [100_001, 100_000, 100_000]
    ids = torch.cat([ids for _, ids, _ in columns])
    assert torch.equal(ids.sort().values, torch.arange(300_001))
    for wide, some, half in columns:
        assert torch.equal(wide, torch.stack([some, some * 2, some * 3], dim=1).float())
        assert torch.equal(half, some.bfloat16())


def test_rows_that_arrive_in_another_order_end_in_the_same_places(tmp_path: Path) -> None:
    sizes = [50, 20, 9]
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(size, generator=generator) for size in sizes]
    as_they_lie, by_order = exchanged(tmp_path, sizes), exchanged(tmp_path, sizes, orders=orders)
    for mine, other in zip(as_they_lie, by_order, strict=True):
        assert torch.equal(mine[1], other[1])


def test_sorted_rows_are_spread_as_if_they_had_been_shuffled(tmp_path: Path) -> None:
    """40 classes one behind the other on four ranks: each ends with its share of each class."""
    columns = exchanged(tmp_path, [10_000] * 4)
    for _, ids, _ in columns:
        counts = np.bincount(ids.numpy() // 1000, minlength=40)
        # hypergeometric with mean 250 and deviation 13.7
        assert np.abs(counts - 250).max() < 5 * 13.7
        assert 8 < counts.std() < 20


def refuse(
    directory: Path, address: Any, error: Any, match: str, rows: Any = (5, 5), **changes: Any
) -> None:
    """Rank 0's part in an exchange with a rank 1 that is somebody else, listening there."""
    held, new = filled(directory, torch.arange(5)), PartitionStore(directory)
    settings = {"deadline_s": 30.0, **changes}
    with RowServer("127.0.0.1", "secret", 20.0, tls=settings.get("tls", False)) as server:
        everyone = Everyone(by_rank(rows), [server.address, address])
        with pytest.raises(error, match=match) as caught:
            part(0, server, lambda: everyone, **settings)(held, None, new, 2)
    held.close()
    new.close()
    assert len(str(caught.value)) < 400
    assert list(directory.iterdir()) == []


NO_ADDRESS = "^rank 1 gave .* which is not an address"
ENCRYPTED: dict[str, Any] = {"tls": True}


@every(
    ("address", "words", "how"),
    [
        *(
            (address, NO_ADDRESS, {})
            for address in (
                None,
                "127.0.0.1:80",
                {"host": "127.0.0.1"},
                [None, 1, None],
                ["127.0.0.1", "1", None],
                ["127.0.0.1", 0, None],
                ["a name", 1, None],
                ["ü" * 300, 1, None],
                ["127.0.0.1", 1 << 16, None],
                ["127.0.0.1", 1, "0" * 64],
                ["127.0.0.1", 1, None, 1],
                ["x" * 100_000, True, None],
            )
        ),
        # who tells of no certificate where rows are encrypted
        *((["127.0.0.1", 1, told], NO_ADDRESS, ENCRYPTED) for told in (None, "ü" * 64, 7)),
        *(
            (None, "the workers disagree about the number of rows", {"rows": (5, more)})
            for more in (-1, 1 << 60)
        ),
        (None, "rank 0 has 5 rows, but the other workers count 6", {"rows": (6, 5)}),
    ],
)
def test_addresses_and_counts_that_no_worker_tells_are_refused_in_words(
    tmp_path: Path, address: Any, words: str, how: Any
) -> None:
    refuse(tmp_path, address, TrainingError, words, **how)


def test_a_worker_that_is_gone_ends_the_exchange_with_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    match = "rank 0 could not fetch its rows from rank 1.*shuffleRows='spark'"
    refuse(tmp_path, ["127.0.0.1", port, None], CollectiveError, match, deadline_s=1.0)


@contextmanager
def rank_1(*messages: Any) -> Iterator[list[Any]]:
    """One who answers a fetch with these messages, then with silence; yields its address."""
    over = threading.Event()

    def answer(connection: Connection) -> None:
        connection.receive_header()
        for message in messages:
            if isinstance(message, Tensor):
                connection.send_values(message)
            else:
                connection.send_header(message)
        over.wait(60)

    with closing(Port("127.0.0.1", "secret", answer)) as port, ExitStack() as stack:
        stack.callback(over.set)
        yield ["127.0.0.1", port.number, None]


COUNT = int(exchange_plan([5, 5], 2, seed=SEED, epoch=2)[1, 0])


FITS = {"rows": COUNT, "shapes": SHAPES}
OF_ANOTHER_NUMBER = f"rank 1 has {COUNT} rows for rank 0, but answered"


@every(
    ("messages", "words"),
    [
        *(
            ([answer], OF_ANOTHER_NUMBER)
            for answer in ({}, {"refused": "no"}, FITS | {"rows": COUNT + 1}, FITS | {"rows": None})
        ),
        *(
            ([FITS | {"shapes": shapes}], "rank 1 announced rows of shapes")
            for shapes in (
                *(None, "abc", [[3], []], [[3], [], [1]]),
                *([[wide], [], []] for wide in (-1, 1 << 29, [3])),
            )
        ),
        ([FITS | {"shapes": [[4], [], []]}], "different shapes: rank 0 .*3.*, rank 1 .*4"),
        (
            [FITS, torch.zeros(3 * COUNT), {"waiting": True}],
            r"rank 0 received \{'waiting': True\} from rank 1 instead of values",
        ),
        ([FITS, torch.zeros(1)], "4 bytes arrived where"),
    ],
)
def test_rows_that_are_not_those_of_the_plan_are_refused(
    tmp_path: Path, messages: list[Any], words: str
) -> None:
    with rank_1(*messages) as address:
        refuse(tmp_path, address, TrainingError, words)


@pytest.mark.nightly
@every("messages", [[FITS], [{"waiting": True}] * 3])
def test_a_worker_that_sends_no_rows_costs_no_more_than_the_deadline(
    tmp_path: Path, messages: list[Any]
) -> None:
    words = "no rows came from rank 1 for 5 s"
    with rank_1(*messages) as address:
        refuse(tmp_path, address, CollectiveError, words, deadline_s=5.0)


def test_a_stranger_in_a_workers_place_is_believed_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.sendall(MAGIC + bytes(32))
                connected.recv(64)
                connected.sendall(bytes(32))  # no proof at all
                connected.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        address = ["127.0.0.1", listener.getsockname()[1], None]
        refuse(tmp_path, address, TrainingError, "rank 1 does not know the job's token")
        thread.join(60)
