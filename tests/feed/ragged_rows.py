"""Rows of unequal length whose every value follows from their id, and what numpy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import feeds
import numpy as np
import pyarrow as pa
import torch

from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.schema import FeedSchema, Ragged
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec, Padding

PAD = 7
WIDTH = 2
TOKENS = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(PAD, "padding_mask"))
EVENTS = ColumnSpec("events", torch.float32, (UNKNOWN, WIDTH), padding=Padding(0.5, "lengths"))
SCHEMA = FeedSchema((TOKENS, EVENTS), ColumnSpec("id", torch.int64))


def tokens_of(row: int, length: int) -> np.ndarray:
    return 100 * row + np.arange(length)


def events_of(row: int, length: int) -> np.ndarray:
    """Other lengths than the tokens: one more."""
    numbers = np.arange((length + 1) * WIDTH).reshape(length + 1, WIDTH) - row
    return numbers.astype(np.float32)


def record_batch(
    lengths: Sequence[int], first: int = 0, keys: Sequence[int] | None = None, **columns: pa.Array
) -> pa.RecordBatch:
    """Rows numbered from ``first``, as Spark delivers them."""
    numbered = list(enumerate(lengths, first))
    columns = {
        "tokens": pa.array([tokens_of(*row) for row in numbered], pa.list_(pa.int32())),
        "events": pa.array(
            [events_of(*row).tolist() for row in numbered], pa.list_(pa.list_(pa.float64()))
        ),
        "id": pa.array([row for row, _ in numbered], pa.int32()),
        **columns,
    }
    if keys is not None:
        columns[ORDER_COLUMN] = pa.array(keys, pa.int64())
    return pa.record_batch(columns)


def record_batches(lengths: Sequence[int], size: int) -> list[pa.RecordBatch]:
    return [record_batch(lengths[k : k + size], k) for k in range(0, len(lengths), size)]


open_feed = partial(feeds.open_feed, schema=SCHEMA)


def padded(rows: Sequence[np.ndarray], value: float) -> np.ndarray:
    """The oracle: row after row into an array that was full of padding."""
    longest = max(1, *(len(row) for row in rows))
    whole = np.full((len(rows), longest, *rows[0].shape[1:]), value, rows[0].dtype)
    for place, row in zip(whole, rows, strict=True):
        place[: len(row)] = row
    return whole


def check(batch: Batch, lengths: Sequence[int]) -> list[int]:
    """Compare a minibatch with what the ids say of it; returns these."""
    ids = [int(each) for each in batch.targets]
    tokens, events, mask, counts = (each.numpy() for each in batch.features)
    np.testing.assert_array_equal(tokens, padded([tokens_of(i, lengths[i]) for i in ids], PAD))
    np.testing.assert_array_equal(events, padded([events_of(i, lengths[i]) for i in ids], 0.5))
    for row, i in enumerate(ids):
        assert mask[row].tolist() == [k >= lengths[i] for k in range(tokens.shape[1])]
    assert counts.tolist() == [lengths[i] + 1 for i in ids]
    return ids


def same(first: Sequence[Batch], second: Sequence[Batch]) -> bool:
    """Whether minibatches have the same bits."""

    def flat(batch: Batch) -> list[torch.Tensor]:
        features = batch.features
        return [*(features.values() if isinstance(features, dict) else features), batch.targets]

    return len(first) == len(second) and all(
        a.last == b.last and all(torch.equal(*pair) for pair in zip(flat(a), flat(b), strict=True))
        for a, b in zip(first, second, strict=True)
    )


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Ragged:
    flat = [number for row in rows for number in row]
    return Ragged(torch.tensor(flat, dtype=dtype), torch.tensor([len(row) for row in rows]))
