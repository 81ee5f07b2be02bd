"""Fixtures for every test: one Spark session with real executor processes."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from auditing import starts
from hypothesis import HealthCheck, settings
from pyspark.sql import SparkSession
from toys import sparkdl_threads
from waiting import eventually
from xdist.scheduler import LoadGroupScheduling

from sparkdl import create_session

torch.set_num_threads(1)
# The programs that tests start, in whichever process of the run, have this Python in their tasks.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# A busy machine must not fail a test, nor examples that nobody has seen before: `make
# test-nightly` draws those.
no_check = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
patient = settings(deadline=None, database=None, suppress_health_check=no_check, print_blob=True)
settings.register_profile("sparkdl", patient, derandomize=True)
settings.register_profile("nightly", patient, derandomize=False)
settings.load_profile("sparkdl")

MAY_SKIP = os.environ.get("MAY_SKIP")
"""Where all is installed: what the reason of a skipped test has to match, or it fails."""


STARTS_NOTHING = {
    "averager/coordination",
    "averager/test_headers.py",
    "averager/test_round_policy.py",
    "averager/values",
    "docs",
    "planner/simulation",
    "planner/test_layer_balance.py",
    "planner/test_layer_splits.py",
    "planner/test_step_memory.py",
    "user_code",
}
"""Folders and files whose tests start no process and open no port, unless they are marked."""
ON_SESSION = "SPARKDL_TESTS_ON_SESSION"
"""A variable of the environment: the file in which the processes of a run list those tests.

xdist 3.8 appends a group's name to ids, and pytest 9.2 has none to which that can be done.
"""
os.environ.setdefault(ON_SESSION, f"{tempfile.gettempdir()}/sparkdl-tests-{os.getpid()}")
APART = {"dedup", "parallel", "volumes"}
"""Folders of rooms that nothing else imports: what has Spark or ranks of its own there is gate."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is reported without collecting garbage meanwhile.

    A report parses the test's source. Before Python 3.11.8 a collection that runs just then may let
    another thread parse too, and both fail with "AST constructor recursion depth mismatch"
    (python/cpython#106905), which ends the whole session.
    """
    gc.disable()
    try:
        report = yield
    finally:
        gc.enable()
    if report.skipped and MAY_SKIP and not re.search(MAY_SKIP, str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"may not be skipped here: {report.longrepr}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is gate in rooms apart, and variants that are for the night.

    Of a ``nightly_variants`` test all but the first, or all but every nth, variants are nightly.
    """
    if hasattr(config, "workerinput"):
        on_session = [each.nodeid for each in items if "spark" in getattr(each, "fixturenames", ())]
        Path(os.environ[ON_SESSION]).write_text("\n".join(on_session))
    met = Counter[str]()
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.parent.name in APART and {"spark", "ranks"} & {*fixtures}:
            item.add_marker(pytest.mark.gate)
        mark = item.get_closest_marker("nightly_variants")
        if mark is None:
            continue
        name = item.nodeid.partition("[")[0]
        place, met[name] = met[name], met[name] + 1
        every = mark.kwargs.get("every")
        if place % every if every else place >= mark.kwargs.get("daily", 1):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    """One process has the cluster and its tests; the files of other tests go to who is free."""
    return ClusterScheduling(config, log) if config.option.dist == "loadgroup" else None


class ClusterScheduling(LoadGroupScheduling):
    """Keeps the tests on the session together, and the other tests of each file."""

    @cached_property
    def _on_session(self) -> set[str]:
        listed = Path(os.environ[ON_SESSION])
        try:
            return {*listed.read_text().splitlines()}
        finally:
            listed.unlink(missing_ok=True)

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid in self._on_session else nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spares later collections of garbage what all tests share: imported modules, and the tests."""
    gc.collect()
    gc.freeze()


DAEMON = """
import pandas
import pyarrow
import torch._dynamo
from pyspark.daemon import manager

manager()
"""
"""Forks processes that have what takes seconds to import: a failed task takes its own along."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Three executors of one core each, in processes of their own."""
    directory = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_DIRS"] = str(directory / "local")
    (directory / "daemon_with_torch.py").write_text(DAEMON)
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    session = create_session(
        "sparkdl tests",
        master="local-cluster[3,1,1024]",
        conf={
            "spark.executor.memory": "1024m",
            "spark.executorEnv.PYTHONPATH": path,
            "spark.python.daemon.module": "daemon_with_torch",
            "spark.sql.shuffle.partitions": "3",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.ui.enabled": "false",
            # As in sessions that others create, where functions may get columns of files.
            "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "true",
            # What fails would fail again, each time in a new Python process; a test kills one.
            "spark.task.maxFailures": "2",
        },
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What a test draws without a seed of its own does not depend on what ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _starts_what_its_tier_may(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without a mark: no Java but that of ``spark``, and nothing at all in some folders."""
    with starts() as started:
        yield
    if any(request.node.get_closest_marker(mark) for mark in ("gate", "nightly")):
        return
    path = request.path.relative_to(Path(__file__).parent)
    nothing = bool({str(path), str(path.parent)} & STARTS_NOTHING)
    java = re.compile(r"subprocess\.Popen \('[^']*(java|spark-submit)'")
    assert not [each for each in started if nothing or java.match(each)]


@pytest.fixture(autouse=True)
def _no_rank_stays() -> Iterator[None]:
    """A rank that outlives its test would draw from the streams of the next ones, and seed them."""
    yield
    ranks = [t for t in sparkdl_threads() if t.name.startswith("sparkdl-rank")]
    for rank in ranks:
        rank.join(60)
    assert not any(rank.is_alive() for rank in ranks), ranks


@pytest.fixture
def nobody_stays() -> Iterator[None]:
    """Every thread of ours that the test started has ended soon after it."""
    before = set(sparkdl_threads())
    yield
    assert eventually(lambda: set(sparkdl_threads()) <= before, 60), sparkdl_threads()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory where ``fsync`` costs nothing, if this machine has one."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        yield Path(directory)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log: each loss is a warning, and a simulation has thousands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
