"""How much more a training step costs on minibatches from the feed than on a constant one.

One process on one thread trains an MLP 784-512-512-10 with batch 256, in steps of 5 ms and more: on
the feed's shuffled minibatches of 50,000 rows, and on the same minibatch again and again.
"""

import tempfile
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import feed_epochs
import harness
import torch
from torch import nn

from sparkdl.feed.feed import Feed
from sparkdl.protocols import Batch
from sparkdl.replica import Replica

ROWS, WIDTH, STEPS = 50_000, 784, 150


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=9, quick_repeats=3)
    torch.set_num_threads(1)
    torch.manual_seed(feed_epochs.SEED)
    model = nn.Sequential(
        nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    replica = Replica(model, partial(torch.optim.SGD, lr=0.01), nn.CrossEntropyLoss())
    table = feed_epochs.arrow_table(torch.rand(ROWS, WIDTH).numpy())
    schema = feed_epochs.schema_of(table.column_names, WIDTH)
    with (
        tempfile.TemporaryDirectory() as name,
        Feed(schema, batch_size=256, seed=7, rank=0, directory=Path(name)) as feed,
    ):
        feed.fill(table.to_batches(max_chunksize=10_000))
        (constant,) = islice(feed.epoch(1), 1)
        epochs = iter(range(2, 1000))
        seconds = harness.interleave(
            {
                "constant": lambda: step(replica, repeat(constant)),
                "feed": lambda: step(replica, feed.epoch(next(epochs))),
            },
            repeats=chosen.repeats,
            warmups=1,
        )
    medians = {name: harness.show(f"step, {name}", taken) for name, taken in seconds.items()}
    claim = harness.Claim(
        name="step on the feed's minibatches / on a constant one",
        ratio=medians["feed"] / medians["constant"],
        target=1.03,
    )
    harness.report("feed_overhead", [claim], {"median_step_seconds": medians})


def step(replica: Replica, batches: Iterable[Batch]) -> float:
    """Seconds per step, over ``STEPS`` of them."""
    started = time.perf_counter()
    for batch in islice(batches, STEPS):
        replica.step(batch)
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    main()
