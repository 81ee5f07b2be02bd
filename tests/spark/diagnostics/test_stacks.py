"""Workers say what they are doing when they are asked, and who cannot is named."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from services import console_of, run_of
from waiting import eventually

from sparkdl.spark.diagnostics import stacks
from sparkdl.spark.diagnostics.console import Console
from sparkdl.spark.diagnostics.run_client import RunClient
from sparkdl.spark.diagnostics.stacks import describe_threads


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def console(request: pytest.FixtureRequest) -> Iterator[Console]:
    shown = lambda rank, lines, left_out: None  # noqa: E731
    with console_of(shown, tls=request.param) as opened:
        yield opened


@pytest.fixture
def stuck() -> Iterator[None]:
    """A thread that sleeps in a function of this name."""
    over = threading.Event()

    def waits_for_godot() -> None:
        over.wait(30)

    thread = threading.Thread(target=waits_for_godot, name="stuck")
    thread.start()
    yield
    over.set()
    thread.join()


def wait_until_connected(console: Console, ranks: set[int]) -> None:
    assert eventually(lambda: set(console.stacks._workers) == ranks, 60)


def test_the_stacks_of_every_other_thread_are_described_the_main_threads_first(
    stuck: None,
) -> None:
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(describe_threads()), name="asking")
    asking.start()
    asking.join()
    threads = [line.split(",")[0] for line in found[0].splitlines() if line.startswith("thread ")]
    assert threads[0] == "thread MainThread"
    assert "thread stuck" in threads
    assert "thread asking" not in threads
    assert "in waits_for_godot" in found[0]


def test_workers_answer_beside_what_they_print(console: Console, stuck: None) -> None:
    with RunClient(console.address, 0) as first, RunClient(console.address, 1) as second:
        wait_until_connected(console, {0, 1})
        first.send_lines(["before"], 0)
        told = console.stacks.ask()
        second.send_lines(["after"], 0)
        ranks = [line.split(" on ")[0] for line in told.splitlines() if line.startswith("rank ")]
        assert ranks == ["rank 0", "rank 1"]
        assert told.count("in waits_for_godot") == 2
        assert console.stacks.ask([1]).startswith("rank 1 on ")
        for client in (first, second):
            client.finish()


def test_the_line_that_a_workers_main_thread_runs_is_told_alone(console: Console) -> None:
    found: list[dict[int, str]] = []
    with RunClient(console.address, 0) as client:
        wait_until_connected(console, {0})
        asking = threading.Thread(target=lambda: found.append(console.stacks.tops([0, 1])))
        asking.start()
        asking.join(20)
        client.finish()
    # The main thread is this test's, which waits in join.
    (top,) = found[0].values()
    assert re.fullmatch(r'File ".*threading.py", line \d+, in \w+: .*', top)


def test_a_worker_that_cannot_answer_is_named_with_its_process(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 0.2)
    monkeypatch.setattr(RunClient, "_listen", lambda self: None)
    with RunClient(console.address, 3):
        wait_until_connected(console, {3})
        assert "did not answer within 0.2 s: it is stopped or cut off" in console.stacks.ask()


def test_whoever_has_left_is_not_asked(console: Console) -> None:
    with RunClient(console.address, 0) as client:
        wait_until_connected(console, {0})
        client.finish()
    wait_until_connected(console, set())
    assert console.stacks.ask() == ""


def test_the_ranks_of_a_function_answer_while_they_wait_for_others(stuck: None) -> None:
    with (
        run_of(2) as run,
        RunClient(run.address, 0) as waiting,
        RunClient(run.address, 1) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        gathering = pool.submit(waiting.gather, {"a": 1})
        wait_until_connected(run, {0, 1})
        assert "in waits_for_godot" in run.stacks.ask([0])
        assert other.gather({"b": 2}) == [{"a": 1}, {"b": 2}]
        assert gathering.result(timeout=60) == [{"a": 1}, {"b": 2}]
        waiting.finish()
        other.finish()
