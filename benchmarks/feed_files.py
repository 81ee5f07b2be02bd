"""Rows as users have them: ``fits`` on more partitions than workers; ``exchange`` if it is named.

``fits``: 20,000,000 rows x 16 numbers and 200,000 rows x 784, in 16 Parquet files, with two workers
on local-cluster[2,1,1536]; the same after a join that Spark shuffles. One epoch of a small model,
in a fresh session for each measurement: seconds of ``fit``, and the peak memory of the larger
executor's JVM. Compared with ``coalesce(2)`` before the fit, after which the rows stay where they
are read.

``exchange``: of rows among four hosts on links of 1 Gbit/s, against the time that the bytes need.
Every host is a network namespace (``linked_hosts``), and every worker a process on it, without
Spark. With "even", each host has as many rows; with "one has all", three hosts begin with none. The
bytes that have to move are those of the busiest direction of the busiest link. Needs root, and the
programs of iproute2.
"""

import argparse
import tempfile
import time
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
from linked_hosts import LinkedHosts, hear, tell
from torch import Tensor, nn

from sparkdl.feed.partition_store import PartitionStore
from sparkdl.process.torch_settings import keep_freed_memory
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import exchange_plan

WORKERS = 2
FILES = 16
MASTER = f"local-cluster[{WORKERS},1,1536]"
CONF = {
    "spark.executor.memory": "1536m",
    # The joined table is small, so Spark would broadcast it to all executors instead.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
WHOLE, MEMORY = "first epoch", "JVM's memory"
OF_COALESCE = 1.1
OURS, BY_HAND = "sparkdl", "coalesce by hand"
UPSTREAMS = ("files", "join")
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

HOSTS = 4
MBIT = 1000.0
EXCHANGED_ROWS, EXCHANGED_WIDTH = 4_000_000, 64
SPECS = (
    ColumnSpec("features", torch.float32, (EXCHANGED_WIDTH,)),
    ColumnSpec("label", torch.int64),
)
ROW_BYTES = 4 * EXCHANGED_WIDTH + 8
SEED = 1
OF_THE_LINK = 1.3
DEADLINE_S = 120.0


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
    """Measures what is asked for, and reports."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "fits": (fits, 3, 1),
        "exchange": (exchange, 5, 1),
    }
    options = harness.parser(__doc__)
    harness.measure_parts("feed_files", options, parts, default=["fits"], child=measure)


def fits(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures fits."""
    claims: list[harness.Claim] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for table, kind in TABLES.items():
            folder = Path(name) / table
            write(folder, table, kind.rows // 10 if chosen.quick else kind.rows)
            for upstream in UPSTREAMS:
                turns = {
                    way: partial(harness.call_child, __file__, str(folder), upstream, way)
                    for way in (OURS, BY_HAND)
                }
                runs = harness.interleave(turns, repeats=chosen.repeats)
                found[f"{table}, {upstream}"] = runs
                claims.append(compared(f"{table}, {upstream}", runs))
    return claims, found


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


def measure(given: str, upstream: str, way: str) -> dict[str, float]:
    """Fits one epoch in a fresh session; returns seconds, and MB of the larger executor's JVM."""
    from sparkdl import ParameterAveraging

    folder = Path(given)
    table = TABLES[(folder / "table").read_text()]
    spark = harness.session(MASTER, CONF)
    rows = spark.read.parquet(str(folder / "rows"))
    if upstream == "join":
        rows = rows.join(spark.read.parquet(str(folder / "ids")), "id")
    settings: dict[str, Any] = {}
    if way == BY_HAND:
        rows, settings = rows.coalesce(WORKERS), {"shuffleRows": "none"}
    estimator = fit_session.estimator(
        model=partial(Classifier, table.width),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=ParameterAveraging(period=50),
        featuresCols=table.features,
        batchSize=table.batch,
        **settings,
    )
    started = time.time()
    history = estimator.fit(rows).history
    seconds = time.time() - started
    expected = sum(pq.ParquetFile(path).metadata.num_rows for path in folder.glob("rows/*"))
    assert [epoch.examples for epoch in history] == [expected]
    peaks = [
        harness.status_bytes("VmHWM", each)
        for each, process in harness.processes().items()
        if EXECUTOR in process.command
    ]
    spark.stop()
    return {WHOLE: round(seconds, 2), MEMORY: round(max(peaks) / 1e6)}


def compared(what: str, runs: dict[str, list[dict[str, float]]]) -> harness.Claim:
    """Prints the medians of one table's runs; returns the claim about their seconds."""
    memory, seconds = (
        {way: [run[figure] for run in of_way] for way, of_way in runs.items()}
        for figure in (MEMORY, WHOLE)
    )
    harness.show_each(memory, f"{what}, {{}}, {MEMORY}", unit="MB", digits=0)
    medians = harness.show_each(seconds, f"{what}, {{}}, {WHOLE}", digits=1)
    name = f"{what}, {WHOLE}: {OURS} / {BY_HAND}"
    return harness.claim(name, medians[OURS], medians[BY_HAND], target=OF_COALESCE)


def exchange(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures the exchange among hosts."""
    rows = EXCHANGED_ROWS // 10 if chosen.quick else EXCHANGED_ROWS
    loads = {"even": [rows // HOSTS] * HOSTS, "one has all": [rows, *[0] * (HOSTS - 1)]}
    with tempfile.TemporaryDirectory() as name, LinkedHosts(HOSTS - 1, Path(name)) as linked:
        linked.limit(MBIT)
        turns = {load: partial(exchanged, linked, of_each) for load, of_each in loads.items()}
        measured = harness.interleave(turns, repeats=chosen.repeats)
    claims = [
        harness.claim(
            f"exchange / (bytes to move / link), {load}",
            median,
            bytes_to_move(loads[load]) * 8 / (MBIT * 1e6),
            target=OF_THE_LINK,
        )
        for load, median in harness.show_each(measured, "exchange, {}").items()
    ]
    return claims, {"seconds": measured}


def bytes_to_move(rows: list[int]) -> int:
    """Bytes of the busiest direction of the busiest link."""
    plan = exchange_plan(rows, len(rows), seed=SEED, epoch=1)
    moving = plan - np.diag(np.diag(plan))
    return int(max(moving.sum(axis=0).max(), moving.sum(axis=1).max())) * ROW_BYTES


def exchanged(linked: LinkedHosts, rows: list[int]) -> float:
    """Returns the seconds from the first worker's start of an exchange to the last one's end."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            partial(take_part, rank, rows, address, Path(folder))
            for rank, address in enumerate(linked.addresses)
        ]
        times = linked.call(parts, DEADLINE_S)
    return float(max(end for _, end in times) - min(start for start, _ in times))


def take_part(rank: int, rows: list[int], host: str, shared: Path) -> tuple[float, float]:
    """One worker: says where it is, hears where all are, exchanges, and returns the times."""
    keep_freed_memory()  # as every worker does
    with tempfile.TemporaryDirectory() as folder, RowServer(host, "token", DEADLINE_S) as server:
        store, received = (PartitionStore(Path(folder)) for _ in range(2))
        for first in range(0, rows[rank], 10_000):
            count = min(10_000, rows[rank] - first)
            features = torch.rand(count, EXCHANGED_WIDTH)
            store.append(SPECS, [features, torch.arange(first, first + count)])
        tell(shared / f"server-{rank}", server.address)
        addresses = [hear(shared / f"server-{each}") for each in range(HOSTS)]
        everyone = Everyone([[part] for part in enumerate(rows)], addresses)
        exchange = RowExchange(
            rank=rank,
            server=server,
            token="token",
            everyone=lambda: everyone,
            specs=SPECS,
            seed=SEED,
            deadline_s=DEADLINE_S,
        )
        # Linux counts from the machine's start, which is the same on each of these hosts.
        start = time.perf_counter()
        exchange(store, None, received, 1)
        end = time.perf_counter()
        tell(shared / f"done-{rank}", None)
        for each in range(HOSTS):  # a worker that ended early would leave others without its rows
            hear(shared / f"done-{each}")
        received.close()
    return start, end


if __name__ == "__main__":
    main()
