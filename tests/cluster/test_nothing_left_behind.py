"""Fits leave no thread, port, process or file behind, in the driver and in the executors."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from every_row import every_row
from frames import CLASSES, WIDTH, all_jobs_end, estimator, frame, same_bits
from models import Saboteur, Traced, lines
from open_files import open_files, unnamed_files
from pyspark.sql import SparkSession
from torch import nn
from waiting import eventually

import sparkdl
from sparkdl import GradientAllReduce, TorchModel
from sparkdl.errors import DataError, WorkerError

LISTENING = "0A"
# Whoever counts what is left has to wait until all is quiet.
pytestmark = pytest.mark.nightly


@dataclass(frozen=True)
class Traces:
    """What can be left behind."""

    threads: tuple[str, ...]
    ports: frozenset[int]
    python_processes: frozenset[int]
    files: frozenset[str]
    open_files: int
    """Open files without a name, in all Python processes."""


def take_traces() -> Traces:
    pythons = [pid for pid in descendants(os.getpid()) if is_python(pid)]
    return Traces(
        tuple(sorted(t.name for t in threading.enumerate() if "sparkdl" in t.name)),
        frozenset(listening_ports(os.getpid())),
        frozenset(pythons),
        frozenset(our_files()),
        sum(len(unnamed_files(pid)) for pid in [os.getpid(), *pythons]),
    )


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended in between
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def is_python(pid: int) -> bool:
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


def listening_ports(pid: int) -> list[int]:
    sockets = {link[8:-1] for link in open_files(pid) if link.startswith("socket:[")}
    ports = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def ports_of_executors() -> set[int]:
    """Those of Spark's Python processes, of which the daemons that start the others listen."""
    return {port for pid in take_traces().python_processes for port in listening_ports(pid)}


def our_files() -> list[str]:
    """Temporary files: all of the driver's, and the executors' except Spark's own."""
    spark_local = Path(os.environ["SPARK_LOCAL_DIRS"])
    found = [*Path(tempfile.gettempdir()).rglob("*"), *spark_local.rglob("*sparkdl*")]
    # pyspark keeps the driver's copy of a broadcast value under such a name in pyspark-*.
    found += [p for p in spark_local.rglob("tmp*") if not p.parent.name.startswith("pyspark-")]
    return [str(path) for path in found]


def traces_at_rest() -> Traces:
    """What is there once whatever is still ending, such as idle threads, has ended."""
    seen = [take_traces()]

    def unchanged() -> bool:
        seen.append(take_traces())
        return seen[-1] == seen[-2]

    time.sleep(0.5)
    eventually(unchanged, 10)
    return seen[-1]


def assert_no_more_than(before: Traces) -> None:
    """Give what ends by itself, such as a Python worker's clean-up, a few seconds."""

    def excess() -> dict[str, object]:
        after = take_traces()
        pythons = len(after.python_processes) - len(before.python_processes)
        more: dict[str, object] = {
            "threads": (before.threads, after.threads) if after.threads != before.threads else (),
            "ports": after.ports ^ before.ports,
            "files": after.files - before.files,
            "open files": max(0, after.open_files - before.open_files),
            "python processes": max(0, pythons),
        }
        return {name: each for name, each in more.items() if each}

    assert eventually(lambda: not excess(), 10), excess()


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs' files in the machine's are not to be seen here."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def warm(spark: SparkSession, tmp_path: Path) -> Traces:
    """What there is after fits that have used every executor, and processes to draw and fork in.

    An executor keeps the modules of the user's own that it was sent until it ends.
    """
    harmless = Saboteur(str(tmp_path / "warm"), "explode", step=1_000_000)
    for changes in ({}, {"model": partial(nn.Linear, WIDTH, CLASSES)}, {"model": harmless}):
        estimator(numWorkers=3, **changes).fit(frame(spark))
    sparkdl.run(os.getpid, num_workers=3)
    return traces_at_rest()


def test_the_traces_that_are_looked_for_would_be_seen(spark: SparkSession, tmp_path: Path) -> None:
    """Guards the tests below, which would pass if nothing could be found."""
    import socket

    before = traces_at_rest()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile(dir=tmp_path):
        done = threading.Event()
        thread = threading.Thread(target=done.wait, args=(60,), name="sparkdl-forgotten")
        thread.start()
        during = take_traces()
        done.set()
        thread.join()
        assert during.ports - before.ports == {server.getsockname()[1]}
    assert "sparkdl-forgotten" in during.threads
    assert during.open_files == before.open_files + 1


def fit(spark: SparkSession, **changes: Any) -> TorchModel:
    return estimator(**{"numWorkers": 3, **changes}).fit(frame(spark))


def ten_fits(spark: SparkSession, folder: Path) -> None:
    for seed in range(10):
        fit(spark, epochs=2, seed=seed)


def two_fits_at_once(spark: SparkSession, folder: Path) -> None:
    """They do not mix."""
    model = partial(nn.Linear, WIDTH, CLASSES)  # drawn by every fit from its own seed
    fits = [partial(fit, spark, model=model, numWorkers=1, epochs=3, seed=seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda one: one(), fits))
    assert all(same_bits(fitted, one()) for fitted, one in zip(together, fits, strict=True))


def three_fits_in_turns(spark: SparkSession, folder: Path) -> None:
    """They need more slots than there are."""
    fits = [partial(fit, spark, numWorkers=2, seed=seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        together = [pool.submit(one) for one in fits]
        models = [fitted.result(timeout=120) for fitted in together]
    assert same_bits(models[2], fits[2]())


def failed_fits(spark: SparkSession, folder: Path, **changes: Any) -> None:
    for rank in range(3):
        model = Saboteur(str(folder / "passes"), "explode", rank=rank)
        with pytest.raises(WorkerError, match=f"rank {rank}.*the reactor is empty"):
            estimator(model=model, numWorkers=3, **changes).fit(frame(spark, rows=90))


def fits_with_exchanges(spark: SparkSession, folder: Path) -> None:
    """Workers exchange among themselves."""
    fit(spark, strategy=GradientAllReduce())
    after_one = traces_at_rest()
    for seed in range(4):
        fit(spark, strategy=GradientAllReduce(), epochs=2, seed=seed)
    assert_no_more_than(after_one)


def functions(spark: SparkSession, folder: Path) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(10))

    for _ in range(3):
        sparkdl.run(train, num_workers=3)


def refused_fits(spark: SparkSession, folder: Path) -> None:
    """The null is on one of three workers; what is found is found by all of them."""
    rows = frame(spark, partitions=3).selectExpr("features", "if(id = 3, null, label) AS label")
    for _ in range(2):
        with pytest.raises(DataError, match="1 null value in 60 rows"):
            estimator(numWorkers=3).fit(rows)


def transforms(spark: SparkSession, folder: Path) -> None:
    model = fit(spark)
    for _ in range(2):
        model.transform(frame(spark)).collect()


@every_row(
    ten_fits,
    two_fits_at_once,
    three_fits_in_turns,
    failed_fits,
    fits_with_exchanges,
    partial(failed_fits, strategy=GradientAllReduce()),
    functions,
    refused_fits,
    transforms,
)
def test_it_leaves_nothing_behind_and_the_next_fit_runs_in_the_same_python_processes(
    spark: SparkSession, warm: Traces, tmp_path: Path, work: Callable[[SparkSession, Path], None]
) -> None:
    work(spark, tmp_path)
    assert all_jobs_end(spark)
    assert warm.python_processes <= take_traces().python_processes
    assert_no_more_than(warm)
    daemons = {port for pid in warm.python_processes for port in listening_ports(pid)}
    assert ports_of_executors() == daemons
    fit(spark, model=Traced(str(tmp_path / "traced")))
    used = {int(line.split()[0]) for line in lines(tmp_path / "traced")} - {os.getpid()}
    assert len(used) == 3
    assert used <= warm.python_processes


def test_saving_leaves_no_scratch_files(spark: SparkSession, tmp_path: Path) -> None:
    model = fit(spark, numWorkers=2)
    before = set(our_files())
    model.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="already exists"):
        model.save(str(tmp_path / "model"))
    assert set(our_files()) <= before
