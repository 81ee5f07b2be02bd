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
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import (
    EVENTS,
    SCHEMA,
    TOKENS,
    check,
    open_feed,
    record_batch,
    record_batches,
    same,
)

from sparkdl import encodings
from sparkdl.errors import DataError
from sparkdl.feed import arrival, lengths
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.decode import tensors_of
from sparkdl.feed.feed import Feed
from sparkdl.feed.fingerprint import fingerprint
from sparkdl.feed.ragged import Column, Ragged, picked
from sparkdl.feed.statistics import ColumnStatistics, DataStatistics, ShardStatistics
from sparkdl.feed.statistics_check import check_statistics
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec, Padding

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


def accept(shard: ShardStatistics) -> None:
    """Find nothing wrong."""


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Ragged:
    flat = [number for row in rows for number in row]
    return Ragged(torch.tensor(flat, dtype=dtype), torch.tensor([len(row) for row in rows]))


def read(feed: Feed, batches: Sequence[pa.RecordBatch], epochs: int = 2) -> list[list[Batch]]:
    shard = feed.fill(batches)
    assert all(map(ColumnStatistics.can_become, shard.columns, SCHEMA.columns))
    return [list(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]


@settings(max_examples=60, deadline=None)
@given(
    rows=LENGTHS,
    size=st.integers(1, 12),
    batch_size=st.integers(1, 7),
    grouped=st.booleans(),
    drop_last=st.booleans(),
    resident=st.sampled_from([None, 1]),
    first_step=st.integers(0, 3),
)
def test_minibatches_are_those_of_numpy_and_have_every_row_once(
    rows: list[int],
    size: int,
    batch_size: int,
    grouped: bool,
    drop_last: bool,
    resident: int | None,
    first_step: int,
) -> None:
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "group_by_length": grouped,
        "drop_last": drop_last,
        "resident_bytes": resident,
    }
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


@settings(max_examples=60, deadline=None)
@given(
    rows=LENGTHS,
    size=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    block_bytes=st.integers(1, 2000),
    grouped=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_streamed_epoch_is_that_of_the_store_at_any_cut(
    rows: list[int], size: int, batch_size: int, block_bytes: int, grouped: bool, drop_last: bool
) -> None:
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as name, patch.context() as changed:
        changed.setattr(arrival, "BLOCK_BYTES", block_bytes)
        seen = []
        for cut in (size, size + 3):
            with open_feed(
                Path(name),
                batch_size=batch_size,
                stream_first_epoch=True,
                group_by_length=grouped,
                drop_last=drop_last,
            ) as feed:
                opening = feed.read_first(record_batches(rows, cut)).opening
                live = list(feed.arriving(accept))
                feed.read_rest()
                assert same(live, list(feed.epoch(1)))
                assert same(live[1:], list(feed.epoch(1, first_step=1)))
                seen.append((opening, live))
    assert seen[0][0] == seen[1][0]
    assert same(seen[0][1], seen[1][1])
    ids = [i for batch in seen[0][1] for i in check(batch, rows)]
    used = len(rows) - (len(rows) % batch_size if drop_last else 0)
    assert len(ids) == len(set(ids)) == used


def test_rows_that_a_shuffle_delivers_in_another_order_give_the_same_minibatches(
    tmp_path: Path,
) -> None:
    rows = [3, 0, 5, 1, 1, 8, 2]
    orders = [[0, 1, 2, 3, 4, 5, 6], [4, 6, 0, 2, 5, 3, 1]]
    epochs = []
    for order in orders:
        whole = record_batch(rows, keys=[10 * i for i in range(7)])
        with open_feed(tmp_path, group_by_length=True, batch_size=2) as feed:
            epochs.append(read(feed, [whole.take(pa.array(order))]))
    assert all(same(*pair) for pair in zip(*epochs, strict=True))


def test_rows_of_about_equal_length_share_a_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "POOL", 5)
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


def test_a_minibatch_of_empty_rows_is_one_item_of_padding(tmp_path: Path) -> None:
    rows = [0, 0, 0]
    with open_feed(tmp_path) as feed:
        ((batch,), _) = read(feed, record_batches(rows, 3))
    assert sorted(check(batch, rows)) == [0, 1, 2]
    assert batch.features[0].shape == (3, 1)
    assert batch.features[2].all()


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


class TestFingerprint:
    """One number for rows of unequal length, whatever their order and their neighbours."""

    @settings(max_examples=60, deadline=None)
    @given(rows=st.lists(st.lists(st.integers(-3, 3), max_size=6), min_size=1, max_size=8))
    def test_it_is_the_sum_over_the_rows_in_any_order(self, rows: list[list[float]]) -> None:
        for dtype in (torch.int64, torch.float32, torch.uint8, torch.bfloat16):
            column = ragged(rows, torch.int64)
            column = Ragged(column.values.to(dtype), column.lengths)
            whole = fingerprint([column])
            one_by_one = sum(
                fingerprint([column.pick(torch.tensor([k]))]) for k in reversed(range(len(rows)))
            )
            assert whole == one_by_one % (1 << 64)

    def test_one_value_one_place_and_trailing_zeros_change_it(self) -> None:
        variants: list[list[list[float]]] = [
            [[1, 2], [3]],
            [[1, 2], [4]],
            [[2, 1], [3]],
            [[1, 2, 0], [3]],
            [[1, 2], [3, 0]],
            [[1], [2, 3]],
            [[1, 2, 3], []],
            [[1, 2], [3], []],
        ]
        assert len({fingerprint([ragged(rows)]) for rows in variants}) == len(variants)

    def test_nan_is_one_value(self) -> None:
        values = torch.tensor([1.0, float("nan")])
        other = values.view(torch.int32).clone()
        other[1] ^= 1
        both = [Ragged(v, torch.tensor([2])) for v in (values, other.view(torch.float32))]
        assert fingerprint([both[0]]) == fingerprint([both[1]])


class TestDecode:
    """From Arrow's lists to ragged columns, and what is refused."""

    def one(self, values: pa.Array, spec: ColumnSpec) -> Column:
        (column,) = tensors_of([values], [spec])
        return column

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.lists(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4)),
        start=st.integers(0, 3),
    )
    def test_nested_lists_of_one_width_are_items(
        self, rows: list[list[list[int]]], start: int
    ) -> None:
        spec = ColumnSpec("x", torch.float32, (UNKNOWN, 3), padding=Padding(0))
        values = pa.array(rows, pa.list_(pa.list_(pa.int32()))).slice(start)
        column = self.one(values, spec)
        assert isinstance(column, Ragged)
        assert column.lengths.tolist() == [len(row) for row in rows[start:]]
        assert column.values.shape[1:] == (3,)
        assert column.values.tolist() == [item for row in rows[start:] for item in row]

    def test_vectors_of_any_size_are_rows(self) -> None:
        kind = pa.struct(
            [
                ("type", pa.int8()),
                ("size", pa.int32()),
                ("indices", pa.list_(pa.int32())),
                ("values", pa.list_(pa.float64())),
            ]
        )
        rows = [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
            {"type": 0, "size": 4, "indices": [2], "values": [5.0]},
        ]
        spec = ColumnSpec("v", torch.float32, (UNKNOWN,), encodings.VECTOR, Padding(-1))
        column = self.one(pa.array(rows, kind), spec)
        assert isinstance(column, Ragged)
        assert column.padded(-1).tolist() == [[1, 2, -1, -1], [0, 0, 5, 0]]

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([[1], None], "1 null values .* empty arrays"),
            ([[1, None], [2]], "1 null elements"),
        ],
    )
    def test_nulls_are_refused_in_words(self, rows: list[Any], words: str) -> None:
        with pytest.raises(DataError, match=words):
            self.one(pa.array(rows, pa.list_(pa.int64())), TOKENS)

    def test_items_of_another_width_are_refused_with_their_row(self) -> None:
        values = pa.array([[[1.0, 2.0]], [[1.0], [2.0, 3.0]]])
        with pytest.raises(DataError, match=r"row 1 is not an array of shape \(any length, 2\)"):
            self.one(values, EVENTS)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1], None, [2]], "1 null values in 3 rows .*row 1 of partition 0.*F.coalesce"),
        ([[1], [None], [2]], "null elements inside its arrays in 1 of 3 rows"),
        ([[], [], []], "only empty arrays"),
    ],
)
def test_what_the_workers_find_is_refused_with_its_place(
    tmp_path: Path, tokens: list[Any], words: str
) -> None:
    batch = record_batch([1, 1, 1], tokens=pa.array(tokens, pa.list_(pa.int32())))
    with open_feed(tmp_path) as feed:
        statistics = DataStatistics.of([feed.fill([batch])])
    with pytest.raises(DataError, match=words):
        check_statistics(statistics, SCHEMA.columns)


def test_unequal_rows_without_padding_are_refused_with_what_pads_them(tmp_path: Path) -> None:
    schema = FeedSchema((ColumnSpec("tokens", torch.int64, (UNKNOWN,)),), SCHEMA.label)
    batch = record_batch([1, 2]).drop_columns(["events"])
    with open_feed(tmp_path, schema=schema) as feed:
        statistics = DataStatistics.of([feed.fill([batch])])
    with pytest.raises(DataError, match=r"padCols=\{'tokens': 0\}"):
        check_statistics(statistics, schema.columns)


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

    def test_closing_closes_both_files_of_each_column(self, tmp_path: Path) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        store = PartitionStore(tmp_path)
        store.append([TOKENS], [ragged([[1], []])])
        assert list(tmp_path.iterdir()) == []
        store.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_masks_are_what_torch_and_hugging_face_take() -> None:
    column = ragged([[1, 2], [], [3]])
    assert column.mask("padding_mask").tolist() == [[False, False], [True, True], [False, True]]
    assert column.mask("attention_mask").tolist() == [[1, 1], [0, 0], [1, 0]]
    assert column.mask("attention_mask").dtype is torch.int64
    assert column.mask("lengths").tolist() == [2, 0, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        ragged([[1, 2], [3]], torch.float32).padded(0.0)[..., None],
        ragged([[1, 2], [3]]).mask("lengths"),
        batch_first=True,
    )
    assert packed.data[:, 0].tolist() == [1, 3, 2]


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "unequal"])
def test_rows_are_copied_though_a_model_differentiates_by_what_it_was_given(ragged: bool) -> None:
    values = torch.arange(6.0).requires_grad_()
    column = Ragged(values, torch.tensor([1, 2, 3])) if ragged else values
    copy = picked(column, torch.tensor([2, 0]))
    found = copy.values if isinstance(copy, Ragged) else copy
    assert not found.requires_grad
    assert found.tolist() == ([3.0, 4.0, 5.0, 0.0] if ragged else [2.0, 0.0])
