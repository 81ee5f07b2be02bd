"""A fit on 10,000 small Parquet files, against pyarrow reading them one after another.

100 rows x 16 numbers per file, two workers on local-cluster[2,1,1536]. The fit's time is that from
``fit`` to the last worker's first step, less that of the same rows in one file per worker: what the
number of files costs. Two processes of plain pyarrow read half of the files each.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import feed_files
import fit_session
import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

WORKERS = 2
ROWS_A_FILE = 100
WIDTH = 15
TARGET = 4.0
"""Above 1, because Spark lists each file in the driver, and opens it with Hadoop's own reader."""


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = harness.parse(options, repeats=3)
    if chosen.measure:
        print(json.dumps({"seconds": first_step(Path(chosen.measure))}), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        write(small, chosen.files, ROWS_A_FILE)
        write(large, WORKERS, ROWS_A_FILE * chosen.files // WORKERS)
        measured = harness.interleave(
            {
                "fit, many files": partial(in_a_session, small),
                "fit, few files": partial(in_a_session, large),
                "pyarrow, many files": partial(read_alone, small),
            },
            repeats=chosen.repeats,
        )
    medians = {name: harness.show(name, seconds, digits=2) for name, seconds in measured.items()}
    of_files = medians["fit, many files"] - medians["fit, few files"]
    a_file = {
        "fit": of_files / chosen.files,
        "pyarrow": medians["pyarrow, many files"] / chosen.files,
    }
    claim = harness.Claim(
        name="a file more in a fit / a file that pyarrow reads",
        ratio=a_file["fit"] / a_file["pyarrow"],
        target=TARGET,
    )
    harness.report("small_files", [claim], {"seconds_a_file": a_file, "seconds": measured})


def write(folder: Path, files: int, rows: int) -> None:
    """Writes a table as ``files`` files of ``rows`` rows each."""
    folder.mkdir()
    draws = np.random.default_rng(3)
    for number in range(files):
        values = draws.random((WIDTH, rows), dtype=np.float32)
        columns: dict[str, Any] = {f"x{k}": values[k] for k in range(WIDTH)}
        columns["label"] = (values[0] > 0.5).astype(np.int64)
        pq.write_table(pa.table(columns), folder / f"{number:05}.parquet", use_dictionary=False)


def in_a_session(folder: Path) -> float:
    """Returns the seconds to the last worker's first step in a process of its own."""
    command = [sys.executable, Path(__file__), "--measure", str(folder)]
    environment = harness.child_environment()
    return float(harness.run_child(command, environment=environment)["seconds"])


def first_step(folder: Path) -> float:
    """Fits in a warm session; returns the seconds to the last worker's first step."""
    from sparkdl import ParameterAveraging, TorchEstimator

    spark = harness.session(feed_files.MASTER, feed_files.CONF)
    rows = spark.read.parquet(str(folder))
    with tempfile.TemporaryDirectory() as stamps:
        estimator = TorchEstimator(
            model=partial(feed_files.Classifier, WIDTH),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(fit_session.StampedSGD, stamps=Path(stamps), lr=0.1),
            strategy=ParameterAveraging(period=50),
            featuresCols=[f"x{k}" for k in range(WIDTH)],
            batchSize=4096,
            numWorkers=WORKERS,
            device="cpu",
            progress=False,
        )
        started = time.time()
        estimator.fit(rows)
        return fit_session.first_step_of_all(Path(stamps)) - started


def read_alone(folder: Path) -> float:
    """Returns the seconds in which two processes read half of the files each, one by one."""
    files = sorted(folder.iterdir())
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        list(pool.map(read_files, [[], []]))  # makes the processes start
        started = time.perf_counter()
        list(pool.map(read_files, [files[rank::WORKERS] for rank in range(WORKERS)]))
        return time.perf_counter() - started


def read_files(files: list[Path]) -> int:
    """Reads files one after another; returns their number of rows."""
    return sum(pq.ParquetFile(file).read().num_rows for file in files)


if __name__ == "__main__":
    main()
