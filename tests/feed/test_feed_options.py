"""What a feed can be asked for: held-out rows, weights, full minibatches, transforms, memory."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from feeds import open_feed
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import printed_by

from sparkdl.errors import ConfigError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.protocols import Batch, ColumnSpec

ID = ColumnSpec("id", torch.int64)
LABEL = ColumnSpec("y", torch.float32)


def rows(count: int, **more: Any) -> list[pa.RecordBatch]:
    columns = {"id": np.arange(count), "y": np.zeros(count), **more}
    return pa.table({name: pa.array(values) for name, values in columns.items()}).to_batches(7)


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.features[0].tolist()]


PLAIN = FeedSchema((ID,), LABEL)


@settings(max_examples=30, deadline=None)
@given(
    marks=st.lists(st.booleans(), max_size=40),
    batch_size=st.integers(1, 9),
    ordered=st.booleans(),
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
    assert isinstance(batch.features, dict)
    assert {name: t.tolist() for name, t in batch.features.items()} == {
        "id": [1, 2],
        "z": [0.5, 1.5],
    }
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
            torch.rand(3)  # the state of the user's generator has no part in it
            runs.append([ids(feed.epoch(epoch)) for epoch in (1, 2)])
            assert sorted(i % 100 for i in runs[-1][0]) == list(range(10))
            assert ids(feed.held_out()) == []
    assert runs[0] == runs[1]
    first, second = ([i // 100 for i in epoch] for epoch in runs[0])
    assert first != second
    assert first[:4] != first[4:8]


def test_a_transform_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    with open_feed(tmp_path, PLAIN, transform=noise) as feed:
        feed.fill(rows(9))
        assert len(list(feed.epoch(1))) == 3
    assert torch.equal(torch.rand(2), expected)


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


STORED = 96 << 20
MEMORY_SCRIPT = """
    import sys, tempfile
    from pathlib import Path
    import numpy as np, pyarrow as pa, torch
    from sparkdl.feed.columns.schema import FeedSchema
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
    # beside the mapped rows there are record batches, chunks on their way and the order of the
    # rows
    assert peak < 32 << 20
