"""From columns to tensors: schemas, conversions, and rows of unequal length."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from feeds import VECTOR, as_vector
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import SCHEMA, check, open_feed, ragged, record_batch, record_batches, same
from torch import Tensor

from sparkdl import encodings
from sparkdl.errors import DataError
from sparkdl.feed import order as orders
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.conversion import first_lost
from sparkdl.feed.feed import Feed
from sparkdl.feed.schema import FeedSchema, Ragged, picked
from sparkdl.feed.shards import DataStatistics, check_statistics
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec

NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()]
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
Column = tuple[pa.Array, ColumnSpec, np.ndarray]
"""As Spark delivers it, what it becomes, and its values, shape (rows, *row_shape)."""


def values_of(draw: Any, *shape: int, largest: int = 100) -> np.ndarray:
    """Whole numbers that every dtype can hold."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.integers(0, largest, shape, endpoint=True)


def numbers(draw: Any, name: str, rows: int) -> Column:
    """A number, or an array of numbers of any depth; flat ones may leave their length open."""
    kind = draw(st.sampled_from(NUMBERS))
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    values = values_of(draw, rows, *shape, largest=1 if kind == pa.bool_() else 100)
    arrow = kind
    for _ in shape:
        arrow = pa.list_(arrow)
    declared = shape if len(shape) != 1 or draw(st.booleans()) else (UNKNOWN,)
    as_kind = values.astype(kind.to_pandas_dtype())
    spec = ColumnSpec(name, draw(st.sampled_from(DTYPES)), declared)
    return pa.array(as_kind.tolist(), arrow), spec, values


def vectors(draw: Any, name: str, rows: int) -> Column:
    values = values_of(draw, rows, draw(st.integers(1, 4)), largest=2)
    column = [as_vector(row.astype(float), sparse=draw(st.booleans())) for row in values]
    spec = ColumnSpec(name, draw(st.sampled_from(DTYPES)), (UNKNOWN,), encodings.VECTOR)
    return pa.array(column, VECTOR), spec, values


def raw_bytes(draw: Any, name: str, rows: int) -> Column:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    values = values_of(draw, rows, *shape)
    tensors = torch.from_numpy(values).to(dtype)
    column = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return pa.array(column, pa.binary()), ColumnSpec(name, dtype, shape, encodings.BYTES), values


@st.composite
def columns(draw: Any) -> list[Column]:
    """The row's id, then columns of drawn types, all with the same number of rows."""
    rows = draw(st.integers(0, 30))
    kinds = draw(st.lists(st.sampled_from([numbers, vectors, raw_bytes]), max_size=5))
    ids = np.arange(rows)
    return [
        (pa.array(ids), ColumnSpec("id", torch.int64), ids),
        *(kind(draw, f"c{index}", rows) for index, kind in enumerate(kinds)),
    ]


@settings(max_examples=40)
@given(table=columns(), data=st.data(), batch_size=st.integers(1, 9))
def test_every_worker_feeds_its_rows_once_an_epoch_with_the_values_that_numpy_has(
    table: list[Column], data: Any, batch_size: int
) -> None:
    rows = len(table[0][0])
    cuts = st.lists(st.integers(0, rows), max_size=6)
    ends = sorted([0, *data.draw(cuts, "cuts"), rows])
    whole = pa.record_batch([arrow for arrow, _, _ in table], [spec.name for _, spec, _ in table])
    record_batches = [whole.slice(start, stop - start) for start, stop in pairwise(ends)]
    workers = data.draw(st.integers(1, 3), "workers")
    seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for rank in range(workers):
        for epoch, batch in epochs_of(record_batches[rank::workers], table, rank, batch_size):
            for (_, spec, values), found in zip(table, batch, strict=True):
                assert found.dtype is spec.dtype
                np.testing.assert_array_equal(found.double().numpy(), values[batch[0].numpy()])
            seen[epoch] += batch[0].tolist()
    assert [sorted(ids) for ids in seen.values()] == [list(range(rows))] * 3


def epochs_of(
    source: list[pa.RecordBatch], table: list[Column], rank: int, batch_size: int
) -> list[tuple[int, tuple[Tensor, ...]]]:
    """(epoch, features) of every minibatch of three epochs."""
    schema = FeedSchema(tuple(spec for _, spec, _ in table), label=())
    with (
        tempfile.TemporaryDirectory() as name,
        Feed(schema, batch_size=batch_size, seed=2, rank=rank, directory=Path(name)) as feed,
    ):
        statistics = feed.fill(source)
        assert all(column.sound for column in statistics.columns)
        return [(e, tuple(batch.features)) for e in (1, 2, 3) for batch in feed.epoch(e)]


SOURCES = ("bool", "int8", "uint8", "int16", "uint16", "int64", "uint64", "float16", "float64")
TARGETS = (*SOURCES, "bfloat16", "float32")


def is_held(number: Any, dtype: str) -> bool:
    """Whether plain Python finds a number in a dtype, rounded to what floats there are."""
    if dtype == "bool":
        return number in (0, 1)
    if "int" in dtype:
        info = torch.iinfo(getattr(torch, dtype))
        return math.isfinite(number) and number == int(number) and info.min <= number <= info.max
    rounded = torch.tensor(float(number), dtype=torch.float64).to(getattr(torch, dtype)).item()
    return not math.isfinite(number) or math.isfinite(rounded)


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=40)
@given(data=st.data())
def test_the_first_number_that_is_lost_is_the_one_that_python_finds(
    source: str, data: st.DataObject
) -> None:
    if source == "bool":
        value: st.SearchStrategy[Any] = st.booleans()
    elif "int" in source:
        info = np.iinfo(source)
        value = st.integers(info.min, info.max) | st.integers(max(info.min, -2), 2)
    else:
        fractions = st.floats(width=16 if source == "float16" else 64)
        value = fractions | st.integers(-300, 300).map(float)
    numbers = np.array(data.draw(st.lists(value, max_size=8)), source)
    target = data.draw(st.sampled_from(TARGETS))
    lost = [i for i, number in enumerate(numbers.tolist()) if not is_held(number, target)]
    assert first_lost(numbers, getattr(torch, target)) == (lost[0] if lost else None)


@every_row(
    (np.array([[7, 82], [850, 900]], "uint16"), torch.uint8, 2),
    (np.array([7, -24], ">i2"), torch.uint8, 1),
    (np.array([2**63], "uint64"), torch.int64, 0),
    (np.array([2**63], "uint64"), torch.float32, None),
    (np.array([65519.0, 65520.0], "float32"), torch.float16, 1),
    (np.array([np.nan, np.inf, 1e38], "float64"), torch.float32, None),
    (np.array([np.nan, np.inf, 1e39], "float64"), torch.float32, 2),
    (np.array([1.0, np.inf]), torch.int64, 1),
    (np.array([[0.1, 1 / 3]]), torch.bfloat16, None),
    (np.array([1.0, 1e38], ml_dtypes.bfloat16), torch.float16, 1),
    (np.array([1.0, 1e38], ml_dtypes.bfloat16), torch.float32, None),
    (np.array([1, -3], ml_dtypes.int4), torch.uint8, 1),
    (np.array([]), torch.uint8, None),
)
def test_arrays_of_any_layout_and_dtype_are_looked_at(
    numbers: np.ndarray, dtype: torch.dtype, place: int | None
) -> None:
    assert first_lost(numbers, dtype) == place


def test_lengths_found_in_the_data_complete_the_columns_that_had_none() -> None:
    numbers, known = ColumnSpec("a", torch.float32), ColumnSpec("b", torch.float32, (3,))
    unknown, label = ColumnSpec("c", torch.int64, (UNKNOWN,)), ColumnSpec("y", torch.int64)
    schema = FeedSchema((numbers, known, unknown), label)
    assert schema.of_lengths([None, 3, None, None]) == schema
    complete = FeedSchema((numbers, known, ColumnSpec("c", torch.int64, (5,))), label)
    assert schema.of_lengths([None, 3, 5, None]) == complete


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


@every("ragged", [False, True])
def test_rows_are_copied_though_a_model_differentiates_by_what_it_was_given(ragged: bool) -> None:
    values = torch.arange(6.0).requires_grad_()
    column = Ragged(values, torch.tensor([1, 2, 3])) if ragged else values
    copy = picked(column, torch.tensor([2, 0]))
    found = copy.values if isinstance(copy, Ragged) else copy
    assert not found.requires_grad
    assert found.tolist() == ([3.0, 4.0, 5.0, 0.0] if ragged else [2.0, 0.0])


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)


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
    first_step=st.integers(0, 3),
)
def test_minibatches_are_those_of_numpy_and_have_every_row_once(
    rows: list[int], size: int, batch_size: int, grouped: bool, drop_last: bool, first_step: int
) -> None:
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "group_by_length": grouped,
        "drop_last": drop_last,
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


@every_row(
    (SCHEMA, [[1], None, [2]], "1 null value in 3 rows .*row 1 of partition 0.*F.coalesce"),
    (SCHEMA, [[1], [None], [2]], "null elements inside its arrays in 1 of 3 rows"),
    (SCHEMA, [[], [], []], "only empty arrays"),
    (NO_PADDING, [[1], [1, 2], [1]], r"padCols=\{'tokens': 0\}"),
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
