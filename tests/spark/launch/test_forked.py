"""Processes forked from a clean one: what they find, how they end, and that none stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from subprocesses import run_python
from waiting import eventually, eventually_gone

from sparkdl.errors import TrainingError
from sparkdl.spark.launch import forked
from sparkdl.spark.launch.forked import ForkServer, fork_server
from sparkdl.spark.launch.rank_host import RankCall, host_ranks


@pytest.fixture
def server() -> Iterator[ForkServer]:
    started = ForkServer(["torch"], {})
    yield started
    started.close()


def call(server: ForkServer, function: str, *arguments: object) -> str:
    rank = RankCall(rank=0, entry=f"{__name__}:{function}", arguments=arguments)
    (answer,) = host_ranks([rank], [], server)
    return str(answer["told"][0].as_py())


# What runs in a process that was forked.


def tell(text: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"told": [str(text)]})


def look(batches: object) -> Iterator[pa.RecordBatch]:
    import torch

    threads = threading.active_count()
    yield from tell((threads, torch.cuda.is_initialized(), os.getsid(0) == os.getpid(), sys.argv))


def say_where(batches: object) -> Iterator[pa.RecordBatch]:
    yield from tell((os.getcwd(), os.environ.get("CHANGED"), os.environ.get("PATH")))


def leave_a_process(batches: object) -> Iterator[pa.RecordBatch]:
    yield from tell(subprocess.Popen(["sleep", "300"]).pid)


def sleep(path: str, batches: object) -> Iterator[pa.RecordBatch]:
    Path(path).write_text(str(os.getpid()))
    time.sleep(300)
    yield from tell("never")


def test_the_server_has_begun_nothing_of_which_a_fork_would_lack_the_rest(
    server: ForkServer,
) -> None:
    threads, on_gpu, leads_session, arguments = eval(call(server, "look"))
    assert threads == 1
    assert not on_gpu
    assert leads_session
    assert arguments == ["-c"]


def test_the_environment_and_directory_are_those_with_which_this_process_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHANGED", "by a task")
    server = ForkServer([], {})
    directory, changed, path = eval(call(server, "say_where"))
    server.close()
    assert directory != str(tmp_path)
    assert changed is None
    assert path == os.environ["PATH"]


def test_a_task_imports_no_torch_to_start_its_ranks() -> None:
    look = "import sys, sparkdl.spark.launch.stage_task; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=120)


def test_what_a_process_leaves_running_ends_with_it(server: ForkServer) -> None:
    assert eventually_gone(int(call(server, "leave_a_process")))


def test_a_missing_package_and_another_version_are_refused_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"'nothing_of_this_name' cannot be imported"):
        ForkServer([], {"nothing_of_this_name": "1"}).wait_until_ready()
    with pytest.raises(RuntimeError, match=r"'pyarrow' is .* here but 0\.0\.1 on the driver"):
        ForkServer([], {"pyarrow": "0.0.1"}).wait_until_ready()


def test_a_server_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TrainingError, match=r"exited at once on .*, with code 1"):
        ForkServer([], {}).wait_until_ready()


def test_a_server_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_server", None)
    first = fork_server([], {})
    assert fork_server([], {}) is first
    os.kill(first._process.pid, signal.SIGKILL)
    first._process.wait()
    second = fork_server([], {})
    assert call(second, "look")
    second.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_server(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    program = (
        f"import os, sys, threading, time; sys.path[:] = {sys.path!r}\n"
        f"from {__name__} import ForkServer, call, end_server\n"
        "server = ForkServer([], {})\n"
        f"told = (server, {str(path)!r}, {int(number)})\n"
        "threading.Thread(target=end_server, args=told).start()\n"
        f"call(server, 'sleep', {str(path)!r})"
    )
    done = run_python("-c", program)
    assert "WorkerLostError" in done.stderr
    assert eventually_gone(int(path.read_text()))


def end_server(server: ForkServer, path: str, number: int) -> None:
    eventually(lambda: os.path.exists(path) and Path(path).read_text(), 60)
    os.kill(server._process.pid, number)
