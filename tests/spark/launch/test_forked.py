"""Processes forked from a clean one, and how they end when a fit or run does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from frames import all_jobs_end, estimator, frame
from pyspark.sql import DataFrame, SparkSession
from subprocesses import run_python
from toys import classification, make_job, mlp
from waiting import eventually, eventually_gone

import sparkdl
from sparkdl.averager import Averager
from sparkdl.driver import run
from sparkdl.errors import DisconnectedError, RowsLostError, TrainingError, WorkerLostError
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.launch import launcher
from sparkdl.spark.launch.assignment import _delivered, run_rank
from sparkdl.spark.launch.launcher import is_its_own
from sparkdl.spark.launch.rank_host import RankCall, first_environment, host_ranks
from sparkdl.worker import Placement, train


def call(function: str, *arguments: object) -> str:
    rank = RankCall(rank=0, entry=f"{__name__}:{function}", arguments=arguments)
    (answer,) = host_ranks([rank], [])
    return str(answer["told"][0].as_py())


def server() -> int:
    """The number of the process that this one's ranks are forked from."""
    return int(call("tell_parent"))


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


# What runs in a process that was forked.


def tell(text: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"told": [str(text)]})


def tell_parent(batches: object) -> Iterator[pa.RecordBatch]:
    yield from tell(os.getppid())


def look(batches: object) -> Iterator[pa.RecordBatch]:
    import torch

    threads = threading.active_count()
    on_gpu, leads = torch.cuda.is_initialized(), os.getsid(0) == os.getpid()
    method = multiprocessing.get_start_method(allow_none=True)
    name = multiprocessing.current_process().name
    yield from tell((threads, on_gpu, leads, sys.argv, method, name))


def say_where(batches: object) -> Iterator[pa.RecordBatch]:
    variables = map(os.environ.get, ("CHANGED", "PATH", "PYTHONPATH"))
    yield from tell((os.getcwd(), *variables))


def leave_a_process(batches: object) -> Iterator[pa.RecordBatch]:
    yield from tell(subprocess.Popen(["sleep", "300"]).pid)


def sleep(path: str, batches: object) -> Iterator[pa.RecordBatch]:
    Path(path).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '300']).pid}")
    time.sleep(300)
    yield from tell("never")


def test_a_rank_finds_nothing_begun_of_which_a_fork_would_lack_the_rest() -> None:
    threads, on_gpu, leads_session, arguments, method, name = eval(call("look"))
    assert threads == 1
    assert not on_gpu
    assert leads_session
    assert arguments == ["-c"]
    assert method is None
    assert name == "MainProcess"


def test_a_server_that_was_killed_is_replaced_by_one_as_this_process_was_when_it_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = server()
    assert server() == first
    (tmp_path / "left").mkdir()
    monkeypatch.chdir(tmp_path / "left")
    (tmp_path / "left").rmdir()
    monkeypatch.setenv("CHANGED", "by a task")
    kill(first)
    before = dict(os.environ), multiprocessing.get_start_method(allow_none=True)
    directory, changed, path, modules = eval(call("say_where"))
    assert server() != first
    assert Path(directory).is_dir()
    assert str(tmp_path) not in directory
    assert changed is None
    assert path == os.environ["PATH"]
    assert modules == first_environment().get("PYTHONPATH")
    assert before == (dict(os.environ), multiprocessing.get_start_method(allow_none=True))


def test_a_task_imports_no_torch_to_start_its_ranks() -> None:
    look = "import sys, sparkdl.spark.launch.stage_task; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=120)


def test_what_a_process_leaves_running_ends_with_it() -> None:
    assert eventually_gone(int(call("leave_a_process")))


def test_a_missing_package_and_another_version_are_refused_in_words() -> None:
    unused: Any = None
    with pytest.raises(RuntimeError, match=r"'nothing_of_this_name' cannot be imported"):
        list(run_rank({"nothing_of_this_name": "1"}, *[unused] * 6))
    with pytest.raises(RuntimeError, match=r"'pyarrow' is .* here but 0\.0\.1 on the driver"):
        list(run_rank({"pyarrow": "0.0.1"}, *[unused] * 6))


def test_a_server_that_cannot_start_is_an_error() -> None:
    program = (
        f"import multiprocessing, sys; sys.path[:] = {sys.path!r}\n"
        f"from {__name__} import call\n"
        "multiprocessing.set_executable('/bin/false')\n"
        "call('look')"
    )
    done = run_python("-c", program)
    assert "TrainingError: no process for a rank on" in done.stderr


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("task", signal.SIGKILL),
        pytest.param("task", signal.SIGTERM, marks=pytest.mark.gate),
        pytest.param("server", signal.SIGKILL, marks=pytest.mark.gate),
        pytest.param("server", signal.SIGTERM, marks=pytest.mark.gate),
    ],
)
def test_ranks_end_with_the_server_and_with_the_task(
    victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    program = (
        f"import os, sys, threading, time; sys.path[:] = {sys.path!r}\n"
        f"from {__name__} import call, end, server\n"
        f"told = (server() if {victim!r} == 'server' else os.getpid(), {str(path)!r})\n"
        f"threading.Thread(target=end, args=(*told, {int(number)})).start()\n"
        f"call('sleep', {str(path)!r})"
    )
    done = run_python("-c", program, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert victim == "task" or "WorkerLostError" in done.stderr
    rank, child = path.read_text().split()
    assert eventually_gone(int(rank))
    assert eventually_gone(int(child))
    assert eventually(lambda: not list(tmp_path.glob("pymp-*")))


@pytest.mark.parametrize(
    "ends",
    [
        # The kernel takes the end of the thread for that of the task.
        "(t := threading.Thread(target=server)).start(), t.join(), time.sleep(1)",
        "pid = server(); os.close(known._forkserver_alive_fd); os.waitpid(pid, 0)",
    ],
    ids=["while its task still runs", "once nobody can ask it for ranks"],
)
def test_a_server_that_ends_before_its_task_leaves_no_socket(tmp_path: Path, ends: str) -> None:
    longer = "import sparkdl.spark.launch.rank_host as host; host.EXIT_S = 60.0"
    (tmp_path / "sitecustomize.py").write_text(longer)
    program = (
        f"import os, signal, sys, threading, time; sys.path[:] = {[str(tmp_path), *sys.path]!r}\n"
        f"from {__name__} import server\n"
        "from multiprocessing.forkserver import _forkserver as known\n"
        f"{ends}\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run_python("-c", program, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert eventually(lambda: not list(tmp_path.glob("pymp-*")), 60)


def end(process: int, path: str, number: int) -> None:
    eventually(lambda: os.path.exists(path) and Path(path).read_text(), 60)
    os.kill(process, number)


PATIENCE_S = 60.0


def fit(rows: DataFrame) -> None:
    estimator(numWorkers=2).fit(rows)


def run_on(rows: DataFrame) -> None:
    sparkdl.run(lambda: time.sleep(PATIENCE_S), num_workers=2, df=rows)


@pytest.mark.parametrize("trains", [fit, run_on])
def test_an_interrupt_before_spark_has_the_job_leaves_none_running(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    trains: Callable[[DataFrame], None],
) -> None:
    """Ctrl-C while the job is planned: Spark gets it only after it was told to cancel it."""
    planned: list[RunJobs] = []
    start, submit = RunJobs.start, launcher.run_tasks

    def interrupted(jobs: RunJobs, *args: Any) -> None:
        planned.append(jobs)
        start(jobs, *args)
        raise KeyboardInterrupt

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1)
        return submit(*args, **kwargs)

    monkeypatch.setattr(RunJobs, "start", interrupted)
    monkeypatch.setattr(launcher, "run_tasks", slowly)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trains(frame(spark, partitions=2))
    assert time.monotonic() - began < 25  # not JOB_END_S
    assert planned[0].ended
    assert all_jobs_end(spark, PATIENCE_S)


@pytest.mark.gate
def test_rows_that_spark_cannot_read_end_a_fit_or_run_with_sparks_own_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    for trains in (fit, run_on):
        path = tmp_path / trains.__name__
        frame(spark, partitions=2).write.parquet(str(path))
        rows = spark.read.parquet(str(path))
        # Before anybody's reader of files: the error is that of Spark's own tasks.
        rows = rows.filter("rand() < 2")
        next(path.glob("*.parquet")).unlink()
        with pytest.raises(TrainingError, match=r"FILE_NOT_EXIST|does not exist") as caught:
            trains(rows)
        assert not isinstance(caught.value, WorkerLostError)
        assert "ArrowInvalid" not in str(caught.value)


def test_the_end_of_sparks_stream_is_no_error_of_the_users_code(tmp_path: Path) -> None:
    def rows() -> Any:
        yield from classification([4]).shards()[0]
        raise pa.ArrowInvalid("Tried reading schema message, was null or length 0")

    with pytest.raises(RowsLostError, match="ArrowInvalid: Tried"):
        list(_delivered(rows()))

    raised: list[RowsLostError] = []

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        placement = Placement(rank=0, directory=tmp_path)
        try:
            train(job, placement, averager.address, _delivered(rows()))
        except RowsLostError as error:
            raised.append(error)
        yield

    job = make_job(mlp(), deadline_s=60.0)
    with pytest.raises(WorkerLostError, match="rank 0"):
        run(job, 1, launch)
    assert raised


def test_a_jobs_own_error_is_told_from_what_lost_workers_do_to_it() -> None:
    own = TrainingError("the Spark job that runs the workers failed: [FAILED_READ_FILE] x")
    gone = TrainingError(f"the Spark job failed: sparkdl.errors.{DisconnectedError.__name__}: rank")
    assert is_its_own(own)
    assert not is_its_own(gone)
    assert not is_its_own(WorkerLostError("Python worker exited unexpectedly"))


WITHOUT_JVM = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from frames import estimator, frame
from pyspark import SparkContext
from torchmetrics import MeanSquaredError
import sparkdl
from sparkdl.callbacks import Callback

seen = {}
def kill():
    seen["pid"] = SparkContext._gateway.proc.pid
    os.kill(seen["pid"], signal.SIGKILL)

class Kills(Callback):
    def on_epoch(self, training, summary):
        if summary.epoch == 2:
            kill()
    def on_end(self, training, error):
        seen["on_end"] = type(error).__name__

def metric_killing_it():
    if "pid" not in seen:
        kill()
    return MeanSquaredError()

def fit(rows):
    kept = {"callbacks": [Kills()], "checkpointPath": sys.argv[2]}
    estimator(numWorkers=2, epochs=10_000, **kept).fit(rows)

def evaluate(rows):
    model = estimator(numWorkers=2).fit(rows)
    model.evaluate(rows, {"mse": metric_killing_it})

def call(rows):
    def kill_it(pid):
        os.kill(pid, signal.SIGKILL)
        time.sleep(300)
    seen["pid"] = SparkContext._gateway.proc.pid
    sparkdl.run(kill_it, seen["pid"], num_workers=2)

spark = sparkdl.create_session("without", master="local[2]", conf={"spark.ui.enabled": "false"})
try:
    globals()[sys.argv[3]](frame(spark, partitions=2))
except Exception as error:
    seen["error"] = [type(error).__name__, str(error)]
print(json.dumps(seen))
"""


def _seen_as_the_jvm_ends(tmp_path: Path, during: str) -> dict[str, Any]:
    """What a program tells whose JVM is killed ``during`` a function of the script above."""
    tests = Path(__file__).parents[2]
    ended = run_python(
        "-c",
        WITHOUT_JVM,
        tests,
        tmp_path / "checkpoints",
        during,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ended.stdout, ended.stderr
    seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    message = seen["error"][1]
    assert message.startswith(f"Spark's JVM (process {seen['pid']}) was ended by SIGKILL")
    return seen


@pytest.mark.gate
def test_the_end_of_the_jvm_is_told_as_such(tmp_path: Path) -> None:
    seen = _seen_as_the_jvm_ends(tmp_path, "fit")
    assert seen["error"][0] == "TrainingError"
    assert seen["on_end"] == "TrainingError"
    assert list((tmp_path / "checkpoints").glob("checkpoint-*"))


@pytest.mark.gate
def test_the_end_of_the_jvm_in_an_evaluation_is_told_as_such(tmp_path: Path) -> None:
    assert _seen_as_the_jvm_ends(tmp_path, "evaluate")["error"][0] == "ConfigError"


@pytest.mark.nightly
def test_the_end_of_the_jvm_in_a_run_is_told_as_such(tmp_path: Path) -> None:
    assert _seen_as_the_jvm_ends(tmp_path, "call")["error"][0] == "TrainingError"
