"""A fit on rows as users have them: more partitions than workers, from files and after a join.

20,000,000 rows x 16 numbers and 200,000 rows x 784, in 16 Parquet files, with two workers on
local-cluster[2,1,1536]; the same after a join that Spark shuffles. One epoch of a small model, in a
fresh session for each measurement: seconds from the start of ``fit`` to the last worker's first
step and to the end, and the peak memory of the larger executor's JVM. Compared with ``coalesce(2)``
before the fit, after which the rows stay where they are read.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fit_session
import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession
from torch import Tensor, nn

WORKERS = 2
FILES = 16
MASTER = f"local-cluster[{WORKERS},1,1536]"
CONF = {
    "spark.executor.memory": "1536m",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    # The joined table is small, so Spark would broadcast it to all executors instead.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
FIRST_STEP, WHOLE, MEMORY = "first step", "first epoch", "JVM's memory"
OF_COALESCE = {FIRST_STEP: 1.1, WHOLE: 1.1}
OURS, BY_HAND = "sparkdl", "coalesce by hand"
UPSTREAMS = ("files", "join")
EXECUTOR = b"org.apache.spark.executor.CoarseGrainedExecutorBackend"
Runs = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Table:
    """One of the tables.

    Attributes:
        rows: the number of rows.
        width: features per row.
        array: whether the features are one array column.
        batch: rows per minibatch.
    """

    rows: int
    width: int
    array: bool
    batch: int

    @property
    def features(self) -> list[str]:
        """The names of the feature columns."""
        return ["x"] if self.array else [f"x{k}" for k in range(self.width)]


TABLES = {
    "narrow": Table(20_000_000, 15, False, 4096),  # plus a label
    "wide": Table(200_000, 784, True, 64),
}


class Classifier(nn.Module):
    """A linear layer over one column of arrays or several columns of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, *features: Tensor) -> Tensor:
        """Outputs for one feature of shape (n, width), or ``width`` features of shape (n,)."""
        whole = features[0] if len(features) == 1 else torch.stack(features, dim=1)
        outputs: Tensor = self.layer(whole)
        return outputs


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    options.add_argument("--part", type=float, default=1.0, help="of the rows, for development")
    options.add_argument("--table", choices=TABLES, action="append", help="by default both")
    options.add_argument("--upstream", choices=UPSTREAMS, action="append", help="by default both")
    chosen = harness.parse(options, repeats=3, child=measure)
    part = chosen.part * (0.1 if chosen.quick else 1.0)
    claims: list[harness.Claim] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for table in chosen.table or TABLES:
            folder = Path(name) / table
            write(folder, table, int(TABLES[table].rows * part))
            for upstream in chosen.upstream or UPSTREAMS:
                turns: dict[str, Callable[[], dict[str, float]]] = {
                    way: partial(in_a_session, folder, upstream, way) for way in (OURS, BY_HAND)
                }
                runs = harness.interleave(turns, repeats=chosen.repeats)
                found[f"{table}, {upstream}"] = runs
                claims += compared(f"{table}, {upstream}", runs)
    harness.report("feed_files", claims, {"part_of_rows": part, "runs": found})


def write(folder: Path, table: str, rows: int) -> None:
    """Writes a table in files of equal size, and another table with the IDs of all its rows."""
    (folder / "rows").mkdir(parents=True)
    (folder / "ids").mkdir()
    (folder / "table").write_text(table)
    kind, draws = TABLES[table], np.random.default_rng(7)
    for number in range(FILES):
        ids = np.arange(rows * number // FILES, rows * (number + 1) // FILES)
        values = draws.random((len(ids), kind.width), dtype=np.float32)
        columns: dict[str, Any] = {"id": ids, "label": (values[:, 0] > 0.5).astype(np.int64)}
        if kind.array:
            columns["x"] = pa.FixedSizeListArray.from_arrays(values.reshape(-1), kind.width)
        else:
            columns |= {name: values[:, k].copy() for k, name in enumerate(kind.features)}
        path = f"{number:02}.parquet"
        pq.write_table(pa.table(columns), folder / "rows" / path, use_dictionary=False)
        pq.write_table(pa.table({"id": ids}), folder / "ids" / path, use_dictionary=False)


def in_a_session(folder: Path, upstream: str, way: str) -> dict[str, float]:
    """Measures one contender in a process of its own."""
    measured: dict[str, float] = harness.call_child(__file__, str(folder), upstream, way)
    print(f"  {folder.name}, {upstream}, {way}: {measured}", flush=True)
    return measured


def measure(given: str, upstream: str, way: str) -> dict[str, float]:
    """Fits one epoch in a fresh session; returns seconds, and MB of the larger executor's JVM."""
    from sparkdl import ParameterAveraging, TorchEstimator

    folder = Path(given)
    table = TABLES[(folder / "table").read_text()]
    spark = harness.session(MASTER, CONF)
    rows = spark.read.parquet(str(folder / "rows"))
    if upstream == "join":
        rows = rows.join(spark.read.parquet(str(folder / "ids")), "id")
    settings: dict[str, Any] = {}
    if way == BY_HAND:
        rows, settings = rows.coalesce(WORKERS), {"shuffleRows": "none"}
    with tempfile.TemporaryDirectory() as stamps:
        estimator = TorchEstimator(
            model=partial(Classifier, table.width),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(fit_session.StampedSGD, stamps=Path(stamps), lr=0.1),
            strategy=ParameterAveraging(period=50),
            featuresCols=table.features,
            batchSize=table.batch,
            numWorkers=WORKERS,
            device="cpu",
            progress=False,
            **settings,
        )
        started = time.time()
        history = estimator.fit(rows).history
        seconds = time.time() - started
        first_step = fit_session.first_step_of_all(Path(stamps)) - started
    expected = sum(pq.ParquetFile(path).metadata.num_rows for path in folder.glob("rows/*"))
    assert [epoch.examples for epoch in history] == [expected]
    found = {
        FIRST_STEP: round(first_step, 2),
        WHOLE: round(seconds, 2),
        MEMORY: round(max(executors_peaks(spark)) / 1e6),
    }
    spark.stop()
    return found


def executors_peaks(spark: SparkSession) -> list[int]:
    """Returns the peak resident memory of each executor's JVM, in bytes; Linux only."""
    application = spark.sparkContext.applicationId.encode()
    peaks = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if EXECUTOR in command and application in command:
                peaks.append(harness.status_bytes("VmHWM", int(process.name)))
        except OSError:  # it has ended
            continue
    if len(peaks) != WORKERS:
        raise RuntimeError(f"found {len(peaks)} executors of {WORKERS}")
    return peaks


def compared(what: str, runs: Runs) -> list[harness.Claim]:
    """Prints the medians of one table's runs; returns the claims about them."""
    units = {FIRST_STEP: "s", WHOLE: "s", MEMORY: "MB"}
    medians = {
        way: {
            each: harness.show(
                f"{what}, {way}, {each}", [run[each] for run in of_way], unit=unit, digits=1
            )
            for each, unit in units.items()
        }
        for way, of_way in runs.items()
    }
    return [
        harness.claim(
            f"{what}, {each}: sparkdl / {BY_HAND}",
            medians[OURS][each],
            medians[BY_HAND][each],
            target=target,
        )
        for each, target in OF_COALESCE.items()
    ]


if __name__ == "__main__":
    main()
