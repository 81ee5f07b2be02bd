"""What many columns and many workers cost, and where they are too many."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, WAIT_S, crew
from toys import drive

from sparkdl.averager import AveragerClient
from sparkdl.averager.messages import headers
from sparkdl.averager.messages.headers import shard_header
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.errors import DataError
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import ShardStatistics

WORKERS, COLUMNS = 8, 50


def test_the_statistics_about_columns_are_added_up_once_however_many_workers_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added, add = [0], ColumnStatistics.__add__

    def counted(one: ColumnStatistics, other: ColumnStatistics) -> ColumnStatistics:
        added[0] += 1
        return add(one, other)

    monkeypatch.setattr(ColumnStatistics, "__add__", counted)
    shard = ShardStatistics(2, (ColumnStatistics(),) * COLUMNS)
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(WORKERS + 1) as pool,
        open_averager(LAYOUT, [torch.zeros(3)], WORKERS, FULL_PRECISION, deadline_s=10) as averager,
    ):
        pool.submit(drive, averager)
        clients = [
            stack.enter_context(AveragerClient(averager.address, rank, FULL_PRECISION))
            for rank in range(WORKERS)
        ]
        starts = [pool.submit(one.start, shard, [torch.zeros(3)], LAYOUT) for one in clients]
        for start in starts:
            start.result(WAIT_S)
        assert clients[-1].shard_rows == [2] * WORKERS
    assert added[0] <= 2 * WORKERS * COLUMNS


def test_more_columns_than_a_header_holds_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By who has read them, before the driver is told of them."""
    shard = ShardStatistics(2, (ColumnStatistics(smallest=-1.5, largest=2.5),) * 2000)
    size = len(json.dumps(shard_header(shard)))
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", size)
    shard_header(shard)
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(DataError, match=rf"2000 columns take {size} bytes.*for about 1999\. Put"):
        shard_header(shard)


def test_more_than_all_may_tell_each_other_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is sent what all have told; so a part of one header is all that each may tell."""
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 1000)
    with crew(2) as workers:
        fits = [workers.call(workers.client(rank).gather, {"a": "x" * 481}) for rank in range(2)]
        assert [len(one.result(WAIT_S)) for one in fits] == [2, 2]
        workers.call(workers.client(0).gather, {"a": "x" * 482})
        error = workers.outcome.exception(WAIT_S)
    assert "rank 0 would share 491 bytes with all 2 workers, but each may share 490" in str(error)
