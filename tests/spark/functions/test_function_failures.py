"""How runs of functions fail, what one leaves to the next, and scripts that are sent."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pytest
import torch
from frames import CLASSES, WIDTH, estimator, frame, same_bits
from pyspark import SparkStageInfo
from pyspark.sql import SparkSession
from torch import nn
from waiting import eventually

import sparkdl
from sparkdl.collective import Network
from sparkdl.errors import ConfigError, DeadlineError, TrainingError, WorkerError, WorkerLostError
from sparkdl.spark.diagnostics import run_service, watchdog
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.functions import serving
from sparkdl.spark.functions.program import Script, run_script
from sparkdl.spark.functions.serving import watch
from sparkdl.spark.launch.launcher import WorkerJob
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.spark.pickling import pickled_result
from sparkdl.transport.service import Service


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoException(BaseException):
    pass


def raise_(kind: type[BaseException], text: str, times: int = 1) -> NoReturn:
    raise kind(text * times)


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


@pytest.mark.gate
def test_an_error_of_any_class_is_told_with_its_traceback(spark: SparkSession) -> None:
    for kind, times, told in (
        (Silent, 1, "Silent: <exception str"),
        (NoException, 1, "NoException: why"),
        (KeyboardInterrupt, 1, "KeyboardInterrupt: why"),
        (GeneratorExit, 1, "GeneratorExit: why"),
        (ValueError, 17_000_000, "ValueError: whywhy"),
    ):
        with pytest.raises(WorkerError, match=r"rank 0 on .*: ") as caught:
            sparkdl.run(raise_, kind, "why", times, num_workers=1)
        assert told in str(caught.value)
        assert "in raise_" in caught.value.worker_traceback
        assert len(str(caught.value)) < 30_000


@pytest.mark.gate
def test_a_process_that_is_interrupted_or_ends_by_itself_is_told_as_it_was(
    spark: SparkSession,
) -> None:
    for leaves, words in (
        (interrupt_itself, "was ended by SIGINT"),
        (partial(os._exit, 0), r"(?s)rank 0 on .*exited with code 0 .*os\._exit"),
    ):
        with pytest.raises(WorkerLostError, match=words) as caught:
            sparkdl.run(leaves, num_workers=1)
    assert "memory" not in str(caught.value)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.gate
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.nightly_variants
def test_a_rank_that_takes_fewer_steps_ends_the_exchanges_of_the_others(
    spark: SparkSession, early: int
) -> None:
    """Also where a module of the user's holds on to what holds the process group."""

    def train() -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        sys.modules["kept"] = DistributedDataParallel(torch.nn.Linear(2, 1))  # type: ignore[assignment]
        for _ in range(3 if dist.get_rank() == early else 5):
            dist.all_reduce(torch.ones(1000))

    with pytest.raises(WorkerError) as caught:
        sparkdl.run(train, num_workers=2)
    late = 1 - early
    assert f"rank {early} had returned when an exchange failed on rank {late}" in str(caught.value)
    assert "all ranks must take the same number of steps" in str(caught.value)
    assert caught.value.rank == late


@pytest.mark.nightly
def test_a_rank_that_still_runs_after_the_others_have_returned_is_named_with_its_place(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(serving, "RETURNED_S", 1.0)
    path = str(tmp_path / "told")

    def validate_slowly() -> int:
        until = time.monotonic() + 120
        while sparkdl.current_worker().rank == 0 and time.monotonic() < until:
            if os.path.exists(path):
                break
            time.sleep(0.1)
        return sparkdl.current_worker().rank

    def release() -> None:
        assert eventually(lambda: "in validate_slowly" in caplog.text, 120)
        Path(path).touch()

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, logger="sparkdl"):
        released = pool.submit(release)
        assert sparkdl.run(validate_slowly, num_workers=2) == [0, 1]
        released.result()
    told = [r.getMessage() for r in caplog.records if "still running" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("rank 1 already returned; rank 0 is still running, in File ")
    assert "in validate_slowly" in told[0]


def test_a_rank_that_waits_to_save_with_one_that_has_returned_is_an_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    def train() -> None:
        if sparkdl.current_worker().rank == 1:
            sparkdl.current_worker().save_checkpoint(str(tmp_path), {"epoch": 1})

    with pytest.raises(TrainingError, match=r"rank 1 would wait .* but rank 0 already returned"):
        sparkdl.run(train, num_workers=2)


@pytest.mark.gate
def test_relative_paths_begin_in_the_drivers_directory_on_every_rank(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def resume() -> tuple[str, bool]:
        return os.getcwd(), Path("snapshot.pt").exists()

    (tmp_path / "snapshot.pt").touch()
    assert sparkdl.run(resume, num_workers=2) == [(str(tmp_path), True)] * 2
    (tmp_path / "other").mkdir()
    assert sparkdl.run(resume, num_workers=2, cwd="other") == [(str(tmp_path / "other"), False)] * 2
    with pytest.raises(WorkerError, match=r"cwd='.*nowhere' is not a directory that rank [01] on"):
        sparkdl.run(resume, num_workers=2, cwd="nowhere")


@pytest.fixture
def service() -> Iterator[RunService]:
    """All of its ranks have finished."""
    with Service("127.0.0.1") as connections, RunService(connections, 2, lambda *_: None) as opened:
        opened._done.update((0, 1))
        yield opened


def job_that(rows: Callable[[], Any], service: RunService, *, starts: bool = True) -> WorkerJob:
    """Spark's job of two tasks, of which ``rows`` gives what they have yielded."""
    frame = SimpleNamespace(mapInArrow=lambda *_, **__: SimpleNamespace(collect=rows))
    names = (
        "getLocalProperty",
        "setLocalProperty",
        "setJobGroup",
        "addJobTag",
        "cancelJobsWithTag",
    )
    context = SimpleNamespace(**{name: lambda *_, **__: None for name in names})
    context._conf = {}
    context._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    frame.sparkSession = SimpleNamespace(sparkContext=context)
    workers = Workers(
        frame=frame,  # type: ignore[arg-type]
        columns=(),
        num_workers=2,
        shuffle="none",
        device="cpu",
        description="a test",
        network=Network(driver="127.0.0.1"),
    )
    told = "os:path", service.address, None, service.fail
    job = WorkerJob(workers, b"", *told, ended_early="")
    return job.__enter__() if starts else job


def test_a_spark_job_that_outlives_its_ranks_ends_the_run(
    service: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "RESULTS_S", 0.5)
    ends = threading.Event()
    job = job_that(lambda: ends.wait(300), service)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"all 2 workers have finished, but .* within 0.5 s"):
        watch(service, job.jobs)
    assert time.monotonic() - started < 150
    ends.set()


def test_results_that_arrive_late_are_waited_for(service: RunService) -> None:
    def late() -> list[Any]:
        time.sleep(0.5)
        results = [(1, "b"), (0, "a")]
        return [SimpleNamespace(rank=r, result=cloudpickle.dumps(v)) for r, v in results]

    job = job_that(late, service)
    watch(service, job.jobs)
    assert [cloudpickle.loads(row.result) for row in job.yielded()] == ["a", "b"]


def test_results_that_are_missing_when_the_job_has_ended_are_not_said_to_be_late() -> None:
    """As where the JVM lacks the memory to hand them over."""
    with pytest.raises(DeadlineError, match="before it ended") as caught:
        serving.results_of({0: pickled_result(1)}, 2)
    assert "within" not in str(caught.value)


class OnWorkersOnly:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("Default process group has not been initialized")


def test_a_result_that_only_a_worker_can_have_is_refused_with_what_to_return() -> None:
    wrapped = OnWorkersOnly()
    wrapped.guard = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"its result\[1\]\.guard is a lock.*state_dict"):
        pickled_result([3, wrapped])
    del wrapped.guard  # type: ignore[attr-defined]
    wrapped.value = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"in the driver: ValueError: Default.*state_dict"):
        serving.results_of({0: pickled_result(wrapped)}, 1)


def test_results_that_are_lost_after_all_have_finished_are_an_error(service: RunService) -> None:
    def too_large() -> None:
        raise RuntimeError("Total size of serialized results is bigger than spark.driver.maxResult")

    job = job_that(too_large, service)
    watch(service, job.jobs)
    with pytest.raises(TrainingError, match="results is bigger than"):
        job.yielded()


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunService]:
    """None of its ranks has joined, and time is up."""
    for module in (run_service, serving):
        monkeypatch.setattr(module, "JOIN_S", 0.0)
    with Service("127.0.0.1") as connections, RunService(connections, 2, lambda *_: None) as opened:
        yield opened


def test_rows_are_waited_for_but_not_the_tasks_in_which_ranks_hang_before_they_join(
    joining: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, postponed = list[int](), list[int]()
    job = job_that(lambda: None, joining, starts=False)

    def stages() -> list[SparkStageInfo]:
        """First of five tasks, then of two whose rows are shuffled, then the workers' own."""
        asked.append(len(asked))
        tasks = 5 if len(asked) <= 2 else 2
        return [SparkStageInfo(min(len(asked), 5) // 2, 0, "", tasks, tasks, 0, 0)]

    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.01)
    monkeypatch.setattr(job.jobs, "stages", stages)
    monkeypatch.setattr(joining, "postpone_deadline", lambda: postponed.append(len(asked)))
    monkeypatch.setattr(watchdog, "feeds_a_shuffle", lambda *_: len(asked) <= 4)
    context: Any = None
    with watched(joining, joining.stacks, job.jobs, context, 2):
        assert eventually(lambda: len(asked) >= 20)
    assert postponed == [1, 2, 3, 4]
    with pytest.raises(DeadlineError, match=r"rank 0, 1 of 2 workers did not start within 0 s"):
        watch(joining, None)


def test_a_rank_that_prints_all_the_time_delays_no_deadline_for_another(
    joining: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(range(5))
    monkeypatch.setattr(joining, "show_next", lambda _: next(lines) >= 0)
    with pytest.raises(DeadlineError, match="rank 0, 1 of 2 workers did not start"):
        watch(joining, None)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank 0] ")]


def look_around() -> dict[str, Any]:
    """What a program may depend on."""
    return {
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variable": os.environ.get("LEFT_BY_A_RUN"),
        "directory": os.getcwd(),
        "warnings": len(warnings.filters),
        "handlers": len(logging.getLogger().handlers),
        "path": "/left" in sys.path,
        "arguments": sys.argv[1:],
        "groups": torch.distributed.is_initialized(),
        "module": "left_by_a_run" in sys.modules,
        "own": [os.getpid(), random.random(), np.random.rand()],
    }


def look_around_and_leave_a_mess() -> dict[str, Any]:
    found = look_around()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BY_A_RUN"] = "yes"
    os.chdir("/")
    warnings.simplefilter("ignore")
    logging.basicConfig()
    sys.path.insert(0, "/left")
    sys.argv.append("left")
    sys.modules["left_by_a_run"] = logging
    torch.distributed.init_process_group("gloo")
    return found


@pytest.mark.gate
def test_a_run_finds_nothing_of_the_run_before(spark: SparkSession) -> None:
    """So logging that every run sets up is set up in every run."""
    first = sparkdl.run(look_around_and_leave_a_mess, num_workers=3)
    second = sparkdl.run(look_around, num_workers=3)
    # Of torch's random numbers all processes have the same.
    assert len({value for each in [*first, *second] for value in each.pop("own")}) == 18
    assert [*first, *second] == [first[0]] * 6
    assert first[0]["dtype"] == "torch.float32"
    assert first[0]["gradients"]


@pytest.mark.nightly
def test_what_a_program_does_at_its_end_is_done_and_shown(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        import atexit
        import threading
        import time

        atexit.register(print, "at exit")
        threading.Thread(target=lambda: time.sleep(0.3) or print("saved")).start()

    sparkdl.run(train, num_workers=1)
    assert shown(capsys) == ["[rank 0] saved", "[rank 0] at exit"]


def in_every_process(
    spark: SparkSession, dtype: torch.dtype, gradients: bool, deterministic: bool
) -> list[Any]:
    """Set torch, as a foreign job does, in Spark's reused Python processes; returns how it was."""

    def leave(_: Any) -> Any:
        yield str(torch.get_default_dtype()), torch.is_grad_enabled()
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(deterministic)

    everywhere = spark.sparkContext.parallelize(range(3), 3).barrier()
    found: list[Any] = everywhere.mapPartitions(leave).collect()
    return found


@pytest.fixture
def in_dirty_processes(spark: SparkSession) -> Iterator[None]:
    in_every_process(spark, torch.float64, False, True)
    yield
    found = in_every_process(spark, torch.float32, True, False)
    assert found == [("torch.float64", False)] * 3  # what was another job's is as that left it


@pytest.mark.gate
def test_a_fit_computes_with_the_drivers_settings_whatever_another_job_has_left(
    spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    fits = estimator(model=partial(nn.Linear, WIDTH, CLASSES), numWorkers=3)
    clean = fits.fit(frame(spark))
    predicted = clean.transform(frame(spark)).select("id", "prediction").collect()
    request.getfixturevalue("in_dirty_processes")
    dirty = fits.fit(frame(spark))
    assert same_bits(clean, dirty)
    assert dirty.transform(frame(spark)).select("id", "prediction").collect() == predicted


TELLS = b"""
import sys
from pathlib import Path
Path(sys.argv[1]).write_text(f"{__name__} {sys.argv[2:]} {__file__} {sys.path[0]}")
"""


def told_by(script: Script, tmp_path: Path) -> list[str]:
    """Its name, arguments, file and directory, as it wrote them down."""
    out = tmp_path / "told"
    out.unlink(missing_ok=True)
    run_script(script, [str(out), "x"])
    return out.read_text().split(" ")


def test_a_script_that_is_there_as_it_was_sent_runs_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(TELLS)
    expected = ["__main__", "['x']", str(path), str(tmp_path)]
    assert told_by(Script(str(path), TELLS), tmp_path) == expected
    assert caplog.text == ""


def test_another_script_at_the_same_path_is_not_run_but_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("raise LookupError('not sent')")
    for there in (b"", TELLS.replace(b"x", b"y"), TELLS + b"\n", b"\xff" * 9):
        caplog.clear()
        path.write_bytes(there)
        name, arguments, file, folder = told_by(Script(str(path), TELLS), tmp_path)
        assert (name, arguments, Path(file).name) == ("__main__", "['x']", "train.py")
        assert Path(file).parent == Path(folder) != tmp_path
        assert not Path(folder).exists()
        assert f"{path} on " in caplog.text
        assert "differs from the driver's" in caplog.text


def test_a_script_that_is_not_there_runs_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").mkdir()
    for path in ("elsewhere/train.py", "train.py"):
        assert told_by(Script(str(tmp_path / path), TELLS), tmp_path)[0] == "__main__"
    assert caplog.text == ""


def test_a_script_keeps_its_own_encoding(tmp_path: Path) -> None:
    check = b"assert name == chr(233)\n"
    for heading, encoding in (("# coding: latin-1\n", "latin-1"), ("", "utf-8")):
        source = f"{heading}name = 'é'\n".encode(encoding)
        run_script(Script(str(tmp_path / "train.py"), source + check), [])


def test_a_script_in_a_directory_that_may_not_be_entered_runs_as_it_was_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert told_by(Script(str(tmp_path / "home" / "train.py"), TELLS), tmp_path)[0] == "__main__"
    assert "cannot be read" in caplog.text


def test_nothing_of_a_script_is_left_in_the_process(tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    with pytest.raises(SystemExit):
        run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.path.clear(); sys.exit(3)"), [])
    run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.exit(0)"), [])
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
