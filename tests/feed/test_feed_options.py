"""The order of rows, and the options of a feed."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from feeds import SCHEMA, epochs_of, ids_of, open_feed, record_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import printed_by
from toys import permutation

from sparkdl.errors import ConfigError
from sparkdl.feed.order import even_sizes
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import Batch, ColumnSpec

ID = ColumnSpec("id", torch.int64)
LABEL = ColumnSpec("y", torch.float32)


def rows(count: int, **more: Any) -> list[pa.RecordBatch]:
    columns = {"id": np.arange(count), "y": np.zeros(count), **more}
    return pa.table({name: pa.array(values) for name, values in columns.items()}).to_batches(7)


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.features[0].tolist()]


PLAIN = FeedSchema((ID,), LABEL)


@settings(max_examples=30)
@given(
    marks=st.lists(st.booleans(), max_size=40), batch_size=st.integers(1, 9), ordered=st.booleans()
)
def test_held_out_rows_are_never_trained_on_and_all_validated_with(
    tmp_path_factory: pytest.TempPathFactory, marks: list[bool], batch_size: int, ordered: bool
) -> None:
    directory = tmp_path_factory.mktemp("store")
    schema = replace(PLAIN, validation=ColumnSpec("held", torch.bool))
    keys = {ORDER_COLUMN: np.arange(len(marks))[::-1]} if ordered else {}
    with open_feed(directory, schema, batch_size) as feed:
        statistics = feed.fill(rows(len(marks), held=pa.array(marks, pa.bool_()), **keys))
        held = [i for i, mark in enumerate(marks) if mark]
        trained = [i for i, mark in enumerate(marks) if not mark]
        assert (statistics.rows, statistics.held_out) == (len(trained), len(held))
        for epoch in (1, 2, 3):
            assert sorted(ids(feed.epoch(epoch))) == trained
            assert ids(feed.held_out()) == (held[::-1] if ordered else held)


@every("unit", [1.0, 1e-46, 1e-300, 1e300])
def test_weights_have_a_mean_of_one_over_all_workers(tmp_path: Path, unit: float) -> None:
    schema = replace(PLAIN, weight=ColumnSpec("w", torch.float64))
    weights = np.array([3.0, 1.0, 0.0, 2.0, 2.0])
    with open_feed(tmp_path, schema, rank=1) as feed:
        shard = feed.fill(rows(5, w=weights * unit))
        assert shard.weight == pytest.approx(8 * unit)
        assert (shard.columns[-1].least, shard.columns[-1].places["least"]) == (unit, (1, 1))
        feed.scale_weights(24 / 8 * unit)
        found = {
            int(i): float(w)
            for batch in feed.epoch(2)
            for i, w in zip(batch.features[0], batch.weights, strict=True)
        }
    assert [found[i] for i in range(5)] == pytest.approx(weights * 8 / 24)


def test_several_labels_and_named_features_come_as_tuple_and_dict(tmp_path: Path) -> None:
    schema = FeedSchema((ID, replace(LABEL, name="z")), (LABEL, ID), by_name=True)
    source = pa.table({"a": [1, 2], "z": [0.5, 1.5], "y": [3.0, 4.0], "i": [5, 6]}).to_batches()
    with open_feed(tmp_path, schema) as feed:
        feed.fill(source)
        (batch,) = feed.epoch(1)
    features = {name: values.tolist() for name, values in batch.features.items()}
    assert features == {"id": [1, 2], "z": [0.5, 1.5]}
    assert [target.tolist() for target in batch.targets] == [[3.0, 4.0], [5, 6]]
    assert batch.examples == 2


def noise(batch: Batch) -> Batch:
    (values,) = batch.features
    return replace(batch, features=(values + torch.randint(1000, values.shape) * 100,))


def test_a_transform_changes_what_is_trained_on_the_same_way_in_every_run(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        with open_feed(tmp_path, PLAIN, transform=noise) as feed:
            feed.fill(rows(10))
            torch.rand(3)  # the state of the user's generator has no part in it, and stays
            before = torch.random.get_rng_state()
            runs.append([ids(feed.epoch(epoch)) for epoch in (1, 2)])
            assert torch.equal(torch.random.get_rng_state(), before)
            assert sorted(i % 100 for i in runs[-1][0]) == list(range(10))
            assert ids(feed.held_out()) == []
    assert runs[0] == runs[1]
    first, second = ([i // 100 for i in epoch] for epoch in runs[0])
    assert first != second
    assert first[:4] != first[4:8]


def test_a_transform_that_returns_no_batch_is_refused(tmp_path: Path) -> None:
    with open_feed(tmp_path, PLAIN, transform=lambda batch: batch.features) as feed:  # type: ignore[arg-type,return-value]
        feed.fill(rows(3))
        with pytest.raises(ConfigError, match="batchTransform returns a tuple"):
            list(feed.epoch(1))


def test_writing_to_a_minibatch_does_not_change_the_rows(tmp_path: Path) -> None:
    with open_feed(tmp_path, PLAIN) as feed:
        feed.fill(rows(9))
        for batch in feed.epoch(1):
            batch.features[0].zero_()  # type: ignore[index]
        assert sorted(ids(feed.epoch(1))) == list(range(9))


def test_a_fault_while_reading_leaves_no_file(tmp_path: Path) -> None:
    def source() -> Any:
        yield from rows(20)
        raise OSError("the shuffle file is gone")

    with pytest.raises(OSError, match="shuffle file"), open_feed(tmp_path, PLAIN) as feed:
        feed.fill(source())
    assert list(tmp_path.iterdir()) == []


STORED = 64 << 20
MEMORY_SCRIPT = """
    import sys, tempfile
    from pathlib import Path
    import numpy as np, pyarrow as pa, torch
    from sparkdl.feed.schema import FeedSchema
    from sparkdl.feed.feed import Feed
    from sparkdl.protocols import ColumnSpec

    def taken():
        # Memory that the system cannot take back, as it can what is mapped from files.
        told = Path("/proc/self/status").read_text().partition("RssAnon:")[2]
        return int(told.split()[0]) * 1024

    def source(rows):
        values = np.random.default_rng(0).random((500, 256), dtype=np.float32)
        offsets = np.arange(0, 500 * 256 + 1, 256, dtype=np.int32)
        lists = pa.ListArray.from_arrays(offsets, values.reshape(-1))
        for start in range(0, rows, 500):
            yield pa.record_batch([lists, pa.array(np.arange(start, start + 500))], ["x", "id"])

    stored, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    rows = stored // 1032 // 500 * 500
    schema = FeedSchema((ColumnSpec("x", torch.float32, (256,)),), ColumnSpec("id", torch.int64))

    def passes(rows, base):
        peak, seen = 0, 0

        def watched():
            nonlocal peak
            for record_batch in source(rows):
                yield record_batch
                peak = max(peak, taken() - base)

        feed = Feed(schema, batch_size=32, seed=1, rank=0, directory=directory)
        with feed:
            feed.fill(watched())
            for epoch in (1, 2, 3):
                for batch in feed.epoch(epoch):
                    seen += batch.examples
                    peak = max(peak, taken() - base)
        assert seen == 3 * rows, seen
        return peak

    passes(500, 0)  # loads what is loaded once
    peak = passes(rows, taken())
    print(peak, rows * 1032)
"""


def test_rows_are_read_and_fed_in_flat_memory(tmp_path: Path) -> None:
    script = textwrap.dedent(MEMORY_SCRIPT)
    printed = printed_by("-c", script, STORED, tmp_path)
    peak, stored = map(int, printed.split())
    assert stored > 0.98 * STORED
    # beside the mapped rows there are record batches, chunks on their way and the rows' order
    assert peak < 32 << 20


class TestOrder:
    """Rows that say where they belong give the same minibatches however they arrive."""

    @staticmethod
    def arrivals(draw: Callable[[Any], Any], rows: list[tuple[int, int]]) -> list[pa.RecordBatch]:
        """(key, id) pairs in a drawn order, in record batches of drawn sizes."""
        shuffled = draw(st.permutations(rows))
        cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        return [
            record_batch([i for _, i in piece], [key for key, _ in piece])
            for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
            for piece in [shuffled[start:stop]]
        ]

    @settings(max_examples=60)
    @given(
        data=st.data(),
        keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20),
        batch_size=st.integers(1, 7),
    )
    def test_rows_in_any_order_of_arrival_give_the_same_minibatches(
        self, data: Any, keys: list[int], batch_size: int
    ) -> None:
        rows = list(zip(keys, range(len(keys)), strict=True))
        ordered = [i for _, i in sorted(rows)]
        # the same rows, arriving in the wanted order and without keys, are the oracle
        expected = epochs_of([record_batch(ordered)], batch_size=batch_size)

        found = epochs_of(self.arrivals(data.draw, rows), batch_size=batch_size)

        for mine, other in zip(found, expected, strict=True):
            assert [batch.last for batch in mine] == [batch.last for batch in other]
            for batch, twin in zip(mine, other, strict=True):
                assert torch.equal(batch.targets, twin.targets)
                assert len(batch.features) == 1
                assert torch.equal(batch.features[0], twin.features[0])

    def test_every_epoch_permutes_the_ordered_rows_of_which_equal_ones_stay_as_they_came(
        self,
    ) -> None:
        mixed = [record_batch([0, 1], [5, -3]), record_batch([2, 3, 4], [9, 0, -7])]
        equal = [record_batch(range(43), [7] * 40 + [1] * 3)]
        for batches, ids in ((mixed, [4, 1, 3, 0, 2]), (equal, [40, 41, 42, *range(40)])):
            for number, epoch in enumerate(epochs_of(batches, seed=4, rank=2), start=1):
                shuffled = permutation(len(ids), seed=4, epoch=number, rank=2).numpy()
                assert ids_of(epoch) == np.array(ids)[shuffled].tolist()


def by_content(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column(ORDER_COLUMN, pa.nulls(batch.num_rows))


@settings(max_examples=60)
@given(data=st.data(), batch_size=st.integers(1, 7))
def test_rows_that_are_ordered_by_content_give_the_same_minibatches_however_they_arrive(
    data: Any, batch_size: int
) -> None:
    """Also rows that are there twice, and those that are held out, each in an order of its own."""
    schema = replace(SCHEMA, validation=ColumnSpec("held out", torch.bool))
    ids = data.draw(st.lists(st.integers(-3, 3), max_size=20))
    found = []
    for _ in range(2):
        arriving = data.draw(st.permutations(ids))
        cut = data.draw(st.integers(0, len(ids)))
        batches = []
        for piece in (arriving[:cut], arriving[cut:]):
            held_out = pa.array([i % 3 == 0 for i in piece])
            batches.append(by_content(record_batch(piece).append_column("held out", held_out)))
        with (
            tempfile.TemporaryDirectory() as name,
            open_feed(Path(name), schema, batch_size) as feed,
        ):
            feed.fill(batches)
            found.append([*feed.epoch(1), *feed.epoch(2), *feed.held_out()])
    mine, other = found
    assert sorted(ids_of(mine)) == sorted(i for i in ids for _ in range(2 if i % 3 else 1))
    for batch, twin in zip(mine, other, strict=True):
        assert torch.equal(batch.targets, twin.targets)
        assert torch.equal(batch.features[0], twin.features[0])


def test_what_becomes_the_same_tensors_need_not_be_told_apart() -> None:
    """Numbers of 64 bits that are one in 32: their order cannot be seen in what is trained on."""
    twins = [1.0, 1.0 + 1e-12]
    schema = FeedSchema((ColumnSpec("x", torch.float32),), ColumnSpec("id", torch.int64))
    found = []
    for values in (twins, twins[::-1]):
        batch = by_content(pa.record_batch({"x": [*values, 2.0], "id": [0, 0, 1]}))
        (epoch,) = epochs_of([batch], schema=schema, epochs=1)
        found.append(torch.cat([each.features[0] for each in epoch]))
    assert torch.equal(*found)


def test_permutations_differ_by_seed_epoch_and_rank() -> None:
    orders = {
        tuple(permutation(40, seed=seed, epoch=epoch, rank=rank).tolist())
        for seed in range(6)
        for epoch in range(1, 7)
        for rank in range(6)
    }
    assert len(orders) == 6**3


@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=5), steps=st.integers(1, 20))
def test_even_sizes_of_several_workers_are_those_of_each(rows: list[int], steps: int) -> None:
    together = np.array([even_sizes(np.array(rows), step, steps) for step in range(steps)])
    alone = [[even_sizes(count, step, steps) for count in rows] for step in range(steps)]
    assert together.tolist() == alone
    assert together.sum(axis=0).tolist() == rows
