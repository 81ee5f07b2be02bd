"""Processes forked from a clean one: what they find, how they end, and that none stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from subprocesses import run_python
from waiting import eventually, eventually_gone

from sparkdl.spark.launch.assignment import run_rank
from sparkdl.spark.launch.rank_host import RankCall, first_environment, host_ranks


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


def end(process: int, path: str, number: int) -> None:
    eventually(lambda: os.path.exists(path) and Path(path).read_text(), 60)
    os.kill(process, number)
