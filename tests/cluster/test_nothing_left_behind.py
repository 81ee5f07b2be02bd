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

import pytest
from frames import CLASSES, WIDTH, estimator, frame, frame_of_sizes, same_bits
from models import Saboteur, Traced, lines
from open_files import open_files, unnamed_files
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import GradientAllReduce
from sparkdl.errors import DataError, WorkerError

LISTENING = "0A"
# Whoever counts what is left has to wait until all is quiet.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


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


def eventually(found: Callable[[], Traces], wanted: Callable[[Traces], bool]) -> Traces:
    """Give what ends by itself, such as a Python worker's clean-up, a few seconds."""
    deadline = time.monotonic() + 10
    traces = found()
    while not wanted(traces) and time.monotonic() < deadline:
        time.sleep(0.1)
        traces = found()
    return traces


def traces_at_rest() -> Traces:
    """What is there once whatever is still ending, such as idle threads, has ended."""
    earlier = [take_traces()]

    def unchanged(traces: Traces) -> bool:
        earlier.append(traces)
        return traces == earlier[-2]

    time.sleep(0.5)
    return eventually(take_traces, unchanged)


def assert_no_more_than(before: Traces) -> None:
    def settled(traces: Traces) -> bool:
        return (
            traces.threads == before.threads
            and traces.ports == before.ports
            and traces.open_files <= before.open_files
            and len(traces.python_processes) <= len(before.python_processes)
            and traces.files <= before.files
        )

    after = eventually(take_traces, settled)
    assert after.threads == before.threads
    assert after.ports == before.ports
    assert after.files <= before.files
    assert after.open_files <= before.open_files
    assert len(after.python_processes) <= len(before.python_processes)


def assert_no_job_runs(spark: SparkSession) -> None:
    tracker = spark.sparkContext.statusTracker()
    deadline = time.monotonic() + 10
    while tracker.getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not tracker.getActiveJobsIds()


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


def test_twenty_fits_in_a_row_leave_nothing_behind(spark: SparkSession, warm: Traces) -> None:
    rows = frame(spark)
    for seed in range(20):
        estimator(numWorkers=3, epochs=2, seed=seed).fit(rows)
    assert_no_more_than(warm)


def test_two_concurrent_fits_leave_nothing_behind_and_do_not_mix(
    spark: SparkSession, warm: Traces
) -> None:
    rows = frame(spark)
    model = partial(nn.Linear, WIDTH, CLASSES)  # drawn by every fit from its own seed
    estimators = [estimator(model=model, numWorkers=1, epochs=3, seed=seed) for seed in (1, 2)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda one: one.fit(rows), estimators))

    assert_no_more_than(warm)
    for fitted, one in zip(together, estimators, strict=True):
        assert same_bits(fitted, one.fit(rows))


def test_concurrent_fits_that_need_more_slots_than_there_are_take_turns(
    spark: SparkSession, warm: Traces
) -> None:
    rows = frame(spark)
    estimators = [estimator(numWorkers=2, seed=seed) for seed in (1, 2, 3)]

    with ThreadPoolExecutor(3) as pool:
        together = [pool.submit(one.fit, rows) for one in estimators]
        models = [fitted.result(timeout=120) for fitted in together]

    assert_no_more_than(warm)
    assert same_bits(models[2], estimators[2].fit(rows))


def test_a_failed_fit_leaves_nothing_behind(
    spark: SparkSession, warm: Traces, tmp_path: Path
) -> None:
    for _ in range(2):
        model = Saboteur(str(tmp_path / "passes"), "explode")
        with pytest.raises(WorkerError):
            estimator(model=model, numWorkers=3).fit(frame(spark, rows=90))
    assert_no_more_than(warm)


def test_a_failed_fit_keeps_the_warm_python_processes(
    spark: SparkSession, warm: Traces, tmp_path: Path
) -> None:
    model = Saboteur(str(tmp_path / "passes"), "explode")
    with pytest.raises(WorkerError):
        estimator(model=model, numWorkers=3).fit(frame(spark, rows=90))
    assert warm.python_processes <= take_traces().python_processes


def test_fits_in_which_workers_exchange_among_themselves_leave_nothing_behind(
    spark: SparkSession, warm: Traces
) -> None:
    rows, ports = frame(spark), ports_of_executors()
    estimator(strategy=GradientAllReduce(), numWorkers=3).fit(rows)
    after_one = traces_at_rest()
    for seed in range(8):
        estimator(strategy=GradientAllReduce(), numWorkers=3, epochs=2, seed=seed).fit(rows)
    assert_no_more_than(after_one)
    assert_no_more_than(warm)
    assert ports_of_executors() == ports


def test_a_failed_all_reduce_leaves_nothing_behind_and_keeps_the_warm_processes(
    spark: SparkSession, warm: Traces, tmp_path: Path
) -> None:
    for rank in range(3):
        model = Saboteur(str(tmp_path / "passes"), "explode", rank=rank)
        with pytest.raises(WorkerError, match=f"rank {rank}.*the reactor is empty"):
            estimator(model=model, strategy=GradientAllReduce(), numWorkers=3).fit(
                frame(spark, rows=90)
            )
    assert_no_job_runs(spark)
    assert_no_more_than(warm)
    assert warm.python_processes <= take_traces().python_processes


def test_functions_of_ones_own_leave_nothing_behind(spark: SparkSession, warm: Traces) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(10))

    ports = ports_of_executors()
    for _ in range(3):
        sparkdl.run(train, num_workers=3)
    assert_no_job_runs(spark)
    assert_no_more_than(warm)
    assert ports_of_executors() == ports


def refuse_a_null(spark: SparkSession) -> None:
    """The null is on one of three workers; what is found is found by all of them."""
    rows = frame(spark, partitions=3).selectExpr("features", "if(id = 3, null, label) AS label")
    with pytest.raises(DataError, match="1 null values in 60 rows"):
        estimator(numWorkers=3).fit(rows)


def test_a_refused_fit_leaves_nothing_behind(spark: SparkSession, warm: Traces) -> None:
    for _ in range(2):
        refuse_a_null(spark)
    assert_no_job_runs(spark)
    assert_no_more_than(warm)


def fit_a_skewed_frame(spark: SparkSession) -> None:
    """It is first tried as it is."""
    estimator(numWorkers=3).fit(frame_of_sizes(spark, [54, 3, 3]))


@pytest.mark.parametrize("before", [refuse_a_null, fit_a_skewed_frame])
def test_the_next_fit_runs_in_the_same_python_processes(
    spark: SparkSession, warm: Traces, tmp_path: Path, before: Callable[[SparkSession], None]
) -> None:
    before(spark)
    trace = tmp_path / "passes"
    model = estimator(model=Traced(str(trace)), numWorkers=3).fit(frame(spark))
    assert model.history[0].examples == 60
    used = {int(line.split()[0]) for line in lines(trace)} - {os.getpid()}
    assert len(used) == 3
    assert used <= warm.python_processes


def test_a_fit_that_starts_anew_after_a_shuffle_leaves_nothing_behind(
    spark: SparkSession, warm: Traces
) -> None:
    for _ in range(2):
        fit_a_skewed_frame(spark)
    assert_no_job_runs(spark)
    assert_no_more_than(warm)


def test_transform_leaves_nothing_behind(spark: SparkSession, warm: Traces) -> None:
    model = estimator(numWorkers=3).fit(frame(spark))
    for _ in range(2):
        model.transform(frame(spark)).collect()
    assert_no_more_than(warm)


def test_saving_leaves_no_scratch_files(spark: SparkSession, tmp_path: Path) -> None:
    model = estimator().fit(frame(spark))
    before = set(our_files())
    model.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="already exists"):
        model.save(str(tmp_path / "model"))
    assert set(our_files()) <= before
