"""Rows of unequal length: padded to the longest of their minibatch, each once an epoch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import SCHEMA, check, open_feed, record_batch, record_batches, same

from sparkdl.errors import DataError
from sparkdl.feed import order as orders
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.feed import Feed
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics, check_statistics
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def read(feed: Feed, batches: Sequence[pa.RecordBatch], epochs: int = 2) -> list[list[Batch]]:
    shard = feed.fill(batches)
    assert all(map(ColumnStatistics.can_become, shard.columns, SCHEMA.columns))
    return [list(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]


@settings(max_examples=60)
@given(
    rows=LENGTHS,
    size=st.integers(1, 12),
    batch_size=st.integers(1, 7),
    grouped=st.booleans(),
    drop_last=st.booleans(),
    first_step=st.integers(0, 3),
)
def test_minibatches_are_those_of_numpy_and_have_every_row_once(
    rows: list[int], size: int, batch_size: int, grouped: bool, drop_last: bool, first_step: int
) -> None:
    options = {"batch_size": batch_size, "group_by_length": grouped, "drop_last": drop_last}
    with tempfile.TemporaryDirectory() as name:
        with open_feed(Path(name), **options) as feed:
            epochs = read(feed, record_batches(rows, size))
            resumed = list(feed.epoch(2, first_step=first_step))
        with open_feed(Path(name), **options) as feed:
            again = read(feed, record_batches(rows, size + 1))
    used = len(rows) - (len(rows) % batch_size if drop_last else 0)
    for epoch in epochs:
        ids = [i for batch in epoch for i in check(batch, rows)]
        assert len(ids) == len(set(ids)) == used
        assert [batch.examples for batch in epoch][:-1] == [batch_size] * max(0, len(epoch) - 1)
        assert [batch.last for batch in epoch] == [False] * (len(epoch) - 1) + [True] * bool(epoch)
    assert all(same(*pair) for pair in zip(epochs, again, strict=True))
    assert same(resumed, epochs[1][first_step:])


def test_rows_of_about_equal_length_share_a_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "POOL", 5)
    rows = np.random.default_rng(3).integers(1, 200, 200).tolist()
    waste = {}
    for grouped in (False, True):
        with open_feed(tmp_path, batch_size=8, group_by_length=grouped) as feed:
            epoch, later = read(feed, record_batches(rows, 50))
        counted = [batch.features[2] for batch in (*epoch, *later)]
        waste[grouped] = sum(int(mask.sum()) for mask in counted) / (2 * sum(rows))
        order = [i for batch in epoch for i in check(batch, rows)]
        assert order != [i for batch in later for i in check(batch, rows)]
        widths = [batch.features[0].shape[1] for batch in epoch]
        assert widths != sorted(widths), "the minibatches are not shuffled"
    assert waste[True] < 0.35 * waste[False]


def test_even_minibatches_of_padded_rows_hold_each_once_some_of_them_empty(tmp_path: Path) -> None:
    rows = [4, 0, 2]
    schema = FeedSchema(SCHEMA.stored, label=(), by_name=True)
    for grouped in (False, True):
        with open_feed(tmp_path, schema=schema, group_by_length=grouped) as feed:
            feed.fill(record_batches(rows, 2))
            batches = list(feed.even_epoch(1, 5))
        sizes = [len(batch.features["id"]) for batch in batches]
        assert (sorted(sizes), sum(sizes)) == ([0, 0, 1, 1, 1], 3)
        named = [list(batch.features) for batch in batches]
        assert named == [["tokens", "events", "id", "padding_mask", "lengths"]] * 5
        found = {int(b.features["id"]): b.features for b in batches if len(b.features["id"])}
        for i, length in enumerate(rows):
            assert found[i]["tokens"].shape == (1, max(1, length))
            assert found[i]["lengths"].tolist() == [length + 1]


def test_held_out_rows_are_padded_and_come_in_one_order(tmp_path: Path) -> None:
    rows = [5, 1, 4, 2, 3, 0, 9]
    schema = FeedSchema(SCHEMA.features, SCHEMA.label, validation=ColumnSpec("held", torch.bool))
    held = pa.array([i % 2 == 1 for i in range(7)])
    for grouped in (False, True):
        with open_feed(tmp_path, schema=schema, batch_size=2, group_by_length=grouped) as feed:
            feed.fill([record_batch(rows, held=held)])
            first, second = list(feed.held_out()), list(feed.held_out())
            trained = [i for batch in feed.epoch(1) for i in check(batch, rows)]
        assert same(first, second)
        ids = [i for batch in first for i in check(batch, rows)]
        assert sorted(ids) == [1, 3, 5]
        assert sorted(trained) == [0, 2, 4, 6]


def test_weights_stay_with_their_rows(tmp_path: Path) -> None:
    rows = [5, 1, 4]
    schema = FeedSchema(SCHEMA.features, SCHEMA.label, ColumnSpec("w", torch.float32))
    with open_feed(tmp_path, schema=schema, group_by_length=True, batch_size=2) as feed:
        feed.fill([record_batch(rows, w=pa.array([1.0, 2.0, 3.0]))])
        feed.scale_weights(2.0)
        found = {
            i: float(weight)
            for batch in feed.epoch(1)
            for i, weight in zip(check(batch, rows), batch.weights, strict=True)
        }
    assert found == {0: 0.5, 1: 1.0, 2: 1.5}


NO_PADDING = FeedSchema((ColumnSpec("tokens", torch.int64, (UNKNOWN,)),), SCHEMA.label)


@every(
    ("schema", "tokens", "words"),
    [
        (SCHEMA, [[1], None, [2]], "1 null value in 3 rows .*row 1 of partition 0.*F.coalesce"),
        (SCHEMA, [[1], [None], [2]], "null elements inside its arrays in 1 of 3 rows"),
        (SCHEMA, [[], [], []], "only empty arrays"),
        (NO_PADDING, [[1], [1, 2], [1]], r"padCols=\{'tokens': 0\}"),
    ],
)
def test_what_the_workers_find_is_refused_with_its_place_or_what_pads_it(
    tmp_path: Path, schema: FeedSchema, tokens: list[Any], words: str
) -> None:
    batch = record_batch([1, 1, 1], tokens=pa.array(tokens, pa.list_(pa.int32())))
    batch = batch.select([spec.name for spec in schema.columns])
    with open_feed(tmp_path, schema=schema) as feed:
        statistics = DataStatistics.of([feed.fill([batch])])
    with pytest.raises(DataError, match=words):
        check_statistics(statistics, schema.columns)
