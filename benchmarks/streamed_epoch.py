"""A fit whose first epoch trains on rows as they arrive, against the same fit that reads them first.

One epoch over 120,000 rows x 784 float32 in Parquet on local-cluster[1,1,2048], so that the JVM
that reads and the process that trains have a core each, with an MLP whose steps together take about
as long as the reading. Seconds of ``fit`` in a warm session, in turns.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path

import feed_epochs
import harness
import numpy as np
import pyarrow.parquet as pq
import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator

ROWS, WIDTH = 120_000, 784
HIDDEN = 128
PERIOD = 20


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=5, quick_repeats=2)
    os.environ.update(harness.child_environment())
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "table"
        write(path)
        spark = harness.session("local-cluster[1,1,2048]", feed_epochs.CONF)
        spark.sparkContext.setLogLevel("OFF")
        frame = spark.read.parquet(str(path))
        turns = {
            "read first": partial(seconds_of_fit, frame, stream=False),
            "streamed": partial(seconds_of_fit, frame, stream=True),
        }
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=2)
        spark.stop()
    medians = {name: harness.show(name, values, digits=2) for name, values in measured.items()}
    claim = harness.Claim(
        name="streamed / read first",
        ratio=medians["streamed"] / medians["read first"],
        target=0.8,
        at_least=False,
    )
    harness.report("streamed_epoch", [claim], {"seconds_of_fit": measured})


def write(path: Path) -> None:
    """Writes the rows as one Parquet file."""
    path.mkdir()
    values = np.random.default_rng(7).random((ROWS, WIDTH), dtype=np.float32)
    table = feed_epochs.arrow_table(values)
    pq.write_table(table, path / "0.parquet", row_group_size=20_000, use_dictionary=False)


def build() -> nn.Module:
    """An MLP of one hidden layer."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def seconds_of_fit(frame: DataFrame, *, stream: bool) -> float:
    """Trains one epoch; returns the seconds it took."""
    estimator = TorchEstimator(
        model=build,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        strategy=ParameterAveraging(period=PERIOD),
        featuresCol="x",
        batchSize=64,
        streamFirstEpoch=stream,
        progress=False,
    )
    started = time.perf_counter()
    history = estimator.fit(frame).history
    assert [epoch.examples for epoch in history] == [ROWS]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
