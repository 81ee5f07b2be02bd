"""Training on rows of unequal length, against padding all of them to the longest.

Token IDs, a log-normal number per row (median 32, sigma 0.8, at most 512), a transformer encoder of
two layers with 64 numbers per token, batch 32. All contenders train the same model on the same rows
in one process on one thread, a shuffled epoch per turn; seconds are processor time, which other
programs on the machine do not lengthen.

- longest: every row padded to the longest of the table, in memory, ``x[permutation[i:i+b]]``
- collate: torch's ``DataLoader`` with a ``collate_fn`` that pads each minibatch by ``pad_sequence``
- ours: the feed with ``padCols``; and with ``groupByLength``
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import harness
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec, Padding
from sparkdl.replica import Replica

ROWS, BATCH, WORDS, WIDTH, LONGEST, SEED = 1024, 32, 10_000, 64, 512, 3
GATHERED_ROWS = 100_000
"""Rows of the table that is only gathered and padded, without a model."""

Epoch = Callable[[], Iterable[Batch]]


class Encoder(nn.Module):
    """Scores a row's two classes by the mean over its encoded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        """Scores of shape (rows, 2)."""
        encoded = self.encoder(self.embedding(tokens), src_key_padding_mask=padding_mask)
        kept = (~padding_mask)[..., None]
        mean: Tensor = self.out((encoded * kept).sum(1) / kept.sum(1))
        return mean


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=5)
    torch.set_num_threads(1)
    rows, labels = table(ROWS)
    replica = build()
    with tempfile.TemporaryDirectory() as name:
        plain, grouped = (
            filled(Path(name), rows, labels, group_by_length=each) for each in (False, True)
        )
        epochs: dict[str, Epoch] = {
            "longest": to_the_longest(rows, labels),
            "collate": collated(rows, labels),
            "ours": counted(plain),
            "ours, grouped": counted(grouped),
        }
        same_model(replica, epochs)
        seconds = harness.interleave(
            {name: partial(train, replica, epoch) for name, epoch in epochs.items()},
            repeats=chosen.repeats,
            warmups=1,
        )
        waste = {name: wasted(epoch(), rows) for name, epoch in epochs.items()}
        for feed in (plain, grouped):
            feed.__exit__(None, None, None)
    speed = {
        name: harness.show(name, [ROWS / each for each in taken], unit="rows/s", digits=1)
        for name, taken in seconds.items()
    }
    for name, share in waste.items():
        print(f"{name}: {share:.0%} of the tokens are padding")
    gathered = gather(chosen.repeats)
    longest = speed["longest"]
    claims = [
        ("rows/s of training, padded by minibatch", speed["ours"] / longest, 1.5),
        ("the same, grouped by length", speed["ours, grouped"] / longest, 1.5),
        ("padded by minibatch / a DataLoader's collate_fn", speed["ours"] / speed["collate"], 0.95),
        ("gathered and padded, no model / collate_fn", gathered["ours"] / gathered["collate"], 2.0),
    ]
    harness.report(
        "padding",
        [harness.Claim(name=n, ratio=r, target=t, at_least=True) for n, r, t in claims],
        {
            "median_rows_per_second": speed,
            "padding_share": waste,
            "gathered_rows_per_second": gathered,
            "longest_row": max(map(len, rows)),
            "mean_row": statistics.mean(map(len, rows)),
        },
    )


def table(count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of token IDs from 1 on, and labels."""
    drawn = np.random.default_rng(SEED)
    lengths = np.clip(drawn.lognormal(np.log(32), 0.8, count), 1, LONGEST).astype(int)
    rows = [drawn.integers(1, WORDS, length) for length in lengths]
    return rows, drawn.integers(0, 2, count)


def build() -> Replica:
    """The model, in training mode."""
    torch.manual_seed(SEED)
    return Replica(Encoder(), partial(torch.optim.SGD, lr=0.01), nn.CrossEntropyLoss())


def filled(directory: Path, rows: list[np.ndarray], labels: np.ndarray, **options: bool) -> Feed:
    """A feed with the rows in its store."""
    schema = FeedSchema(
        (ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "padding_mask")),),
        ColumnSpec("label", torch.int64),
    )
    feed = Feed(
        schema,
        batch_size=BATCH,
        seed=SEED,
        rank=0,
        directory=directory,
        options=FeedOptions(**options),
    )
    batch = pa.record_batch({"tokens": pa.array(rows), "label": pa.array(labels)})
    feed.fill(batch.slice(k, 10_000) for k in range(0, len(rows), 10_000))
    return feed


def counted(feed: Feed) -> Epoch:
    """Returns a function that returns a feed's epochs one after another."""
    numbers = iter(range(1, 1_000_000))
    return lambda: feed.epoch(next(numbers))


def to_the_longest(rows: list[np.ndarray], labels: np.ndarray) -> Epoch:
    """Every row as long as the longest, as a table would have to be without ``padCols``."""
    whole = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
    targets = torch.from_numpy(labels)

    def epoch() -> Iterator[Batch]:
        for chosen in torch.split(torch.randperm(len(rows)), BATCH):
            tokens = whole[chosen]
            yield Batch((tokens, tokens == 0), targets[chosen], last=False)

    return epoch


def collated(rows: list[np.ndarray], labels: np.ndarray) -> Epoch:
    """The torch loader, which pads row after row in Python."""

    def collate(items: list[tuple[Tensor, int]]) -> Batch:
        tokens = pad_sequence([row for row, _ in items], batch_first=True)
        targets = torch.tensor([label for _, label in items])
        return Batch((tokens, tokens == 0), targets, last=False)

    pairs = list(zip(map(torch.from_numpy, rows), labels.tolist(), strict=True))
    return lambda: DataLoader(pairs, batch_size=BATCH, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def same_model(replica: Replica, epochs: dict[str, Epoch]) -> None:
    """Check that the padding changes no row's outputs: the loss over all rows is the same."""
    losses = {}
    for name, epoch in epochs.items():
        total, weight = replica.evaluate(epoch())
        losses[name] = total / weight
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses


def train(replica: Replica, epoch: Epoch) -> float:
    """Seconds of an epoch."""
    replica.module.train()
    started = time.process_time()
    for batch in epoch():
        replica.step(batch)
    return time.process_time() - started


def wasted(batches: Iterable[Batch], rows: list[np.ndarray]) -> float:
    """The share of padding among all tokens of an epoch."""
    sizes = sum(batch.features[0].numel() for batch in batches)  # type: ignore[index]
    return 1 - sum(map(len, rows)) / sizes


def gather(repeats: int) -> dict[str, float]:
    """Rows/s of an epoch without a model."""

    def drain(epoch: Epoch) -> float:
        started = time.process_time()
        for _ in epoch():
            pass
        return GATHERED_ROWS / (time.process_time() - started)

    rows, labels = table(GATHERED_ROWS)
    with tempfile.TemporaryDirectory() as name, filled(Path(name), rows, labels) as feed:
        contenders = {"collate": collated(rows, labels), "ours": counted(feed)}
        speeds = harness.interleave(
            {name: partial(drain, epoch) for name, epoch in contenders.items()},
            repeats=repeats,
            warmups=1,
        )
    return {
        name: harness.show(f"{name}, no model", each, unit="rows/s", digits=0)
        for name, each in speeds.items()
    }


if __name__ == "__main__":
    main()
