"""A fit whose first epoch trains on rows as they arrive, against one that reads them first.

One epoch over 120,000 rows x 784 float32 in Parquet on local-cluster[1,1,2048], so that the JVM
that reads and the process that trains have a core each, with an MLP whose steps together take about
as long as the reading. Timed from the start of ``fit`` to the first step and to the end, in a warm
session, in turns.
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
from pyspark import TaskContext
from pyspark.sql import DataFrame
from torch import Tensor, nn

from sparkdl import ParameterAveraging, TorchEstimator

ROWS, WIDTH = 120_000, 784
HIDDEN = 128
PERIOD = 20


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=7, quick_repeats=2)
    os.environ.update(harness.child_environment())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "table")
        spark = harness.session("local-cluster[1,1,2048]", feed_epochs.CONF)
        spark.sparkContext.setLogLevel("OFF")
        frame = spark.read.parquet(str(folder / "table")).coalesce(1)
        first_steps: dict[str, list[float]] = {"read first": [], "streamed": []}
        turns = {
            how: partial(seconds_of_fit, frame, folder / "step", how == "streamed", steps)
            for how, steps in first_steps.items()
        }
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=2)
        spark.stop()
    claims = []
    counted = {how: steps[-chosen.repeats :] for how, steps in first_steps.items()}
    for what, seconds, target in (("first step", counted, 0.6), ("whole fit", measured, 1.0)):
        medians = [harness.show(f"{what}, {how}", seconds[how], digits=2) for how in turns]
        claims.append(
            harness.Claim(
                name=f"{what}: streamed / read first",
                ratio=medians[1] / medians[0],
                target=target,
                at_least=False,
            )
        )
    harness.report("streamed_epoch", claims, {"first_step_s": counted, "fit_s": measured})


def write(path: Path) -> None:
    """Writes the rows as one Parquet file."""
    path.mkdir()
    values = np.random.default_rng(7).random((ROWS, WIDTH), dtype=np.float32)
    table = feed_epochs.arrow_table(values)
    pq.write_table(table, path / "0.parquet", row_group_size=20_000, use_dictionary=False)


class Network(nn.Module):
    """An MLP with one hidden layer that records when a worker begins its first step."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
        self.note: Path | None = note

    def forward(self, features: Tensor) -> Tensor:
        """Outputs for (n, 784) numbers."""
        if self.note is not None and TaskContext.get() is not None:
            self.note.write_text(str(time.time()))
            self.note = None
        outputs: Tensor = self.layers(features)
        return outputs


def seconds_of_fit(frame: DataFrame, note: Path, stream: bool, first_steps: list[float]) -> float:
    """Trains one epoch; returns its seconds, and appends those to the first step to a list."""
    estimator = TorchEstimator(
        model=partial(Network, note),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        strategy=ParameterAveraging(period=PERIOD),
        featuresCol="x",
        batchSize=64,
        streamFirstEpoch=stream,
        progress=False,
    )
    started = time.time()
    history = estimator.fit(frame).history
    seconds = time.time() - started
    assert [epoch.examples for epoch in history] == [ROWS]
    first_steps.append(float(note.read_text()) - started)
    return seconds


if __name__ == "__main__":
    main()
