"""Which worker has read which partition makes no difference to the rows that each has then."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from exchanges import part
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.record_batches.packed import ORDER_COLUMN, PLACE_COLUMN
from sparkdl.feed.statistics.column import places_from
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowServer
from sparkdl.reshuffle.exchange import Everyone

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
        feeds = [
            stack.enter_context(
                Feed(
                    SCHEMA, batch_size=3, seed=5, rank=rank, directory=Path(folder), options=options
                )
            )
            for rank in range(len(readers))
        ]
        found = DataStatistics.of(
            [
                feed.fill(batches([partitions[number] for number in numbers], draws=draws))
                for feed, numbers in zip(feeds, readers, strict=True)
            ]
        )
        servers = [stack.enter_context(RowServer("127.0.0.1", "secret", 20.0)) for _ in feeds]
        addresses = [server.address for server in servers]

        def exchange(rank: int) -> list[list[int]]:
            feed = feeds[rank]
            training, validating = (
                part(
                    rank,
                    servers[rank],
                    partial(Everyone.of, found.parts, addresses, held_out=held_out),
                    SCHEMA.stored,
                )
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
@settings(max_examples=15, deadline=None)
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
