"""The order of rows, by epoch and by seed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from feeds import (
    epochs_of,
    ids_of,
    open_feed,
    record_batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import (
    classification,
    make_job,
    mlp,
    permutation,
)

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.order import epoch_order, even_sizes
from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.testing import batches_of, run_world


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

    @settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch_size=st.integers(1, 7))
def test_rows_that_are_ordered_by_content_give_the_same_minibatches_however_they_arrive(
    data: Any, batch_size: int
) -> None:
    """Also rows that are there twice, and those that are held out, each in an order of its own."""
    schema = FeedSchema(
        (ColumnSpec("wide", torch.float32, (UNKNOWN,)),),
        ColumnSpec("id", torch.int64),
        validation=ColumnSpec("held out", torch.bool),
    )
    ids = data.draw(st.lists(st.integers(-3, 3), max_size=20))
    found = []
    for _ in range(2):
        arriving = data.draw(st.permutations(ids))
        cut = data.draw(st.integers(0, len(ids)))
        batches = [
            by_content(
                record_batch(piece).append_column("held out", pa.array([i % 3 == 0 for i in piece]))
            )
            for piece in (arriving[:cut], arriving[cut:])
        ]
        with (
            tempfile.TemporaryDirectory() as name,
            open_feed(Path(name), batch_size=batch_size, schema=schema) as feed,
        ):
            feed.fill(batches)
            found.append([*feed.epoch(1), *feed.epoch(2), *feed.held_out()])
    mine, other = found
    assert sorted(ids_of(mine)) == sorted(
        2 * [i for i in ids if i % 3] + [i for i in ids if not i % 3]
    )
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


def test_a_run_on_ordered_rows_does_not_depend_on_their_arrival() -> None:
    data = classification([17, 12])
    job = make_job(mlp(), epochs=3)

    def train(seed: int) -> dict[str, Tensor]:
        shards = []
        for rank in range(2):
            features, targets = data.shard(rank)
            arrival = np.random.default_rng([seed, rank]).permutation(len(targets))
            shards.append(
                batches_of(
                    5, features=features[arrival], label=targets[arrival], order=arrival * 10
                )
            )
        return run_world(job, shards).module.state_dict()

    expected = run_world(job, data.shards()).module.state_dict()
    for seed in (1, 2):
        found = train(seed)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@given(rows=st.integers(0, 300), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(1, 999))
def test_a_permutation_holds_every_index_once(rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(seed, epoch, 2, rows, rows, (), None)
    assert torch.equal(order, permutation(rows, seed=seed, epoch=epoch, rank=2))
    assert order.dtype is torch.int64
    assert sorted(order.tolist()) == list(range(rows))


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
