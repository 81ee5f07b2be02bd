"""The workers of ``sparkdl.run`` meet, print and fail in the driver, and nobody else gets in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from services import Intruder, run_of
from waiting import eventually

from sparkdl.averager import headers
from sparkdl.errors import SparkDLError, StoppedError, TrainingError, WorkerError, WorkerLostError
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.run_client import SAVED, RunClient
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.stacks import ReportingWorker
from sparkdl.transport import framing


@pytest.fixture
def shown() -> list[Any]:
    """What the driver has shown of the run."""
    return []


@pytest.fixture
def run(shown: list[Any]) -> Iterator[RunService]:
    with run_of(2, shown=shown) as opened:
        yield opened


def failure_of(run: RunService, within_s: float = 10.0) -> SparkDLError:
    assert eventually(lambda: run.failure, within_s), "the run has not failed"
    assert run.failure is not None
    return run.failure


def test_what_is_gathered_arrives_in_the_order_of_the_ranks_any_number_of_times(
    run: RunService,
) -> None:
    def take_part(rank: int) -> list[list[dict[str, int]]]:
        with RunClient(run.address, rank) as client:
            found = [client.gather({"from": rank, "turn": turn}) for turn in range(20)]
            client.finish()
            return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take_part, [0, 1])

    expected = [[{"from": rank, "turn": turn} for rank in (0, 1)] for turn in range(20)]
    assert first == second == expected
    assert eventually(lambda: run.all_finished, 60)
    assert run.failure is None


def test_the_statistics_about_all_rows_take_no_more_than_those_of_one_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many workers there are: 63 with 1,000 columns each were too many for a header."""
    for module in (framing, headers):
        monkeypatch.setattr(module, "MAX_HEADER_BYTES", 40_000)
    shards = [
        ShardStatistics(
            10 + rank,
            tuple(
                ColumnStatistics(nulls=rank, smallest=float(rank), largest=9.0) for _ in range(100)
            ),
            held_out=1,
            weight=0.5,
        )
        for rank in range(8)
    ]

    def take_part(rank: int) -> DataStatistics:
        with RunClient(opened.address, rank) as client:
            statistics = client.gather_statistics(shards[rank])
            client.finish()
            return statistics

    with run_of(8) as opened, ThreadPoolExecutor(8) as pool:
        told = list(pool.map(take_part, range(8)))
    assert told == [DataStatistics.of(shards)] * 8


def test_more_than_all_may_tell_each_other_is_refused_in_words(
    run: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 1000)
    with RunClient(run.address, 1) as client, pytest.raises(StoppedError):
        client.gather({"text": "x" * 500})
    assert "rank 1 would share 512 bytes with all 2 workers, but each may share 490" in str(
        failure_of(run)
    )


def test_statistics_and_other_things_are_not_gathered_together(run: RunService) -> None:
    with (
        RunClient(run.address, 0) as first,
        RunClient(run.address, 1) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        other = pool.submit(first.gather, {})
        statistics = pool.submit(second.gather_statistics, ShardStatistics(3, ()))
        assert "did not all report the same columns" in str(failure_of(run))
        assert isinstance(other.exception(10), StoppedError)
        assert isinstance(statistics.exception(10), StoppedError)


def test_who_has_returned_waits_for_the_others_and_is_known(run: RunService) -> None:
    with (
        RunClient(run.address, 0) as first,
        RunClient(run.address, 1) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(first.say_returned)
        assert eventually(lambda: run.stragglers(0.0) == ("rank 0 already returned", [1]), 60)
        assert run.stragglers(60.0) == ("", [])
        assert not waiting.done()
        other.say_returned()
        waiting.result(timeout=60)
        other.finish()
        first.finish()
        assert eventually(lambda: run.all_finished, 60)
    assert run.stragglers(0.0)[1] == []


def test_who_saves_alone_is_known_and_who_gathers_for_another_reason_is_not(
    run: RunService,
) -> None:
    with (
        RunClient(run.address, 0) as first,
        RunClient(run.address, 1) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(first.gather, {"rows": 3})
        assert eventually(lambda: bool(run._waiting), 60)
        assert run.stragglers(0.0) == ("", [])
        other.gather({"rows": 2})
        waiting.result(timeout=60)
        waiting = pool.submit(first.gather, SAVED)
        saves = "rank 0 called save_checkpoint, as all ranks must"
        assert eventually(lambda: run.stragglers(0.0) == (saves, [1]), 60)
        other.gather(SAVED)
        waiting.result(timeout=60)


@pytest.mark.parametrize("returns_first", [True, False])
def test_who_waits_for_a_rank_that_has_returned_ends_the_run(
    run: RunService, returns_first: bool
) -> None:
    with (
        RunClient(run.address, 0) as returns,
        RunClient(run.address, 1) as waits,
        ThreadPoolExecutor(2) as pool,
    ):
        if returns_first:
            returned = pool.submit(returns.say_returned)
            assert eventually(lambda: run.stragglers(0.0) == ("rank 0 already returned", [1]), 60)
            waiting = pool.submit(waits.gather, {})
        else:
            waiting = pool.submit(waits.gather, {})
            assert eventually(lambda: bool(run._waiting), 60)
            returned = pool.submit(returns.say_returned)
        assert "rank 1 would wait for all ranks" in str(failure_of(run))
        assert "but rank 0 already returned" in str(run.failure)
        run.__exit__(None, None, None)
        assert isinstance(waiting.exception(10), StoppedError)
        assert isinstance(returned.exception(10), StoppedError)


@pytest.mark.parametrize(("of_exchange", "told"), [(True, True), (False, False)])
def test_an_exchange_that_breaks_after_a_rank_has_returned_is_told_so(
    run: RunService, of_exchange: bool, told: bool
) -> None:
    with (
        RunClient(run.address, 0) as failing,
        RunClient(run.address, 1) as returned,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(returned.say_returned)
        assert eventually(lambda: run.stragglers(0.0) == ("rank 1 already returned", [0]), 60)
        failing.report_failure("rank 0: closed by peer", "in train", of_exchange=of_exchange)
        error = failure_of(run)
        run.__exit__(None, None, None)
        assert isinstance(waiting.exception(10), StoppedError)
    assert ("rank 1 had returned when an exchange failed on rank 0" in str(error)) is told
    assert "rank 0: closed by peer" in str(error)


def test_a_failure_ends_the_run_with_the_workers_traceback_and_wakes_who_waits(
    run: RunService,
) -> None:
    with RunClient(run.address, 0) as waiting, RunClient(run.address, 1) as failing:
        timer = threading.Timer(0.2, failing.report_failure, ["rank 1: boom", "in boom"])
        timer.start()
        with pytest.raises(StoppedError, match="rank 0 was stopped"):
            waiting.gather({})
        timer.join()
    error = failure_of(run)
    assert isinstance(error, WorkerError)
    assert (error.rank, str(error), error.worker_traceback) == (1, "rank 1: boom", "in boom")


def test_a_connection_that_breaks_is_a_lost_worker(run: RunService) -> None:
    client = RunClient(run.address, 1)
    client._connection.interrupt()
    assert isinstance(failure_of(run), WorkerLostError)
    assert "rank 1" in str(failure_of(run))
    client._connection.close()


def test_later_failures_are_dropped_and_none_comes_after_the_end(run: RunService) -> None:
    run.fail(TrainingError("first"))
    run.fail(TrainingError("second"))
    assert str(run.failure) == "first"


def test_a_rank_that_is_none_of_the_run_ends_it() -> None:
    for rank, words in ((2, "is not part of this run"), (-1, "must join with a rank")):
        with run_of(2) as run, RunClient(run.address, rank):
            assert words in str(failure_of(run))


def test_a_rank_that_joins_twice_ends_the_run(run: RunService) -> None:
    with RunClient(run.address, 0), RunClient(run.address, 0):
        assert "or the rank has already joined" in str(failure_of(run))


def test_nobody_gets_in_without_the_token(run: RunService) -> None:
    with pytest.raises(StoppedError, match="not have the same token"):
        RunClient(replace(run.address, token="guessed"), 0)
    with socket.create_connection(run.address.host_and_port, timeout=60) as stranger:
        stranger.sendall(b'{"attend": 0, "host": "here"}' * 10)
        time.sleep(0.2)
    assert run.missing == [0, 1]
    assert run.failure is None


@pytest.fixture
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert died == []


JOINS = {"attend": 1, "host": "here"}


UNSEEN: dict[str, dict[str, Any]] = {
    "lines-no-list": {"lines": 3, "left_out": 0},
    "lines-an-object": {"lines": {"a": 1}, "left_out": 0},
    "lines-of-numbers": {"lines": [1], "left_out": 0},
    "lines-without-count": {"lines": ["a"]},
    "count-is-text": {"lines": ["a"], "left_out": "x"},
    "count-is-negative": {"lines": ["a"], "left_out": -1},
    "count-is-a-boolean": {"lines": ["a"], "left_out": True},
    "report-no-object": {"report": 3},
    "report-is-null": {"report": None},
    "report-of-text": {"report": {"loss": "low"}},
    "report-of-null": {"report": {"loss": None}},
    "report-of-a-huge-number": {"report": {"loss": 10**400}},
    "stacks-is-null": {"stacks": None},
}


@pytest.mark.usefixtures("no_thread_dies")
def test_output_that_cannot_be_read_is_left_out_with_a_word_and_the_run_goes_on(
    run: RunService, shown: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Intruder(run, JOINS) as intruder, RunClient(run.address, 0) as other:
        silent = []
        for name, header in UNSEEN.items():
            caplog.clear()
            intruder.send_header(header)
            intruder.send_header({"lines": [name], "left_out": 0})
            run.show_next(60)
            told = "rank 1 sent a header that no worker sends" in caplog.text
            if shown[-1:] != [(1, (name,), 0)] or not told:
                silent.append((name, shown[-1:], told))
        assert silent == []
        intruder.send_header({"gather": {"from": 1}})
        assert other.gather({"from": 0}) == [{"from": 0}, {"from": 1}]
        assert run.failure is None


ENDING: dict[str, dict[str, Any]] = {
    "unknown": {"hello": 1},
    "empty": {},
    "failure-no-object": {"failure": 3},
    "failure-without-fields": {"failure": {}},
    "failure-of-numbers": {"failure": {"of_data": 1, "message": 2, "traceback": 3}},
    "long": {"hello": "x" * 1_000_000},
}


@pytest.mark.usefixtures("no_thread_dies")
def test_a_rank_that_cannot_be_understood_ends_the_run_in_words_and_wakes_who_waits() -> None:
    wrong = []
    for name, header in ENDING.items():
        with run_of(2) as run, RunClient(run.address, 0) as other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.gather, {})
            with Intruder(run, JOINS) as intruder:
                intruder.send_header(header)
                error = failure_of(run)
            if (
                not isinstance(error, TrainingError)
                or "rank 1 " not in str(error)
                or len(str(error)) >= 500
                or not isinstance(stopped := waiting.exception(60), StoppedError)
                or "rank 0 was stopped" not in str(stopped)
            ):
                wrong.append((name, error))
    assert wrong == []


def test_a_rank_that_gives_twice_before_the_others_have_given_ends_the_run(run: RunService) -> None:
    with Intruder(run, JOINS) as intruder:
        intruder.send_header({"gather": 1})
        intruder.send_header({"gather": 2})
        assert "rank 1 sent a second object" in str(failure_of(run))


@pytest.mark.usefixtures("no_thread_dies")
def test_who_joins_without_rank_or_host_ends_the_run_in_words() -> None:
    joins: list[dict[str, Any]] = [
        {"attend": "0", "host": "h"},
        {"attend": True, "host": "h"},
        {"attend": 0},
        {"lines": []},
    ]
    for said in joins:
        with run_of(2) as run, Intruder(run, said):
            told = str(failure_of(run))
            assert "must join with a rank and a host, not with" in told, said


@pytest.mark.usefixtures("no_thread_dies")
def test_a_mistake_of_our_own_ends_the_run_as_well(
    run: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.messages, "lines", ({}, lambda *_: 1 // 0))
    with Intruder(run, JOINS) as intruder:
        intruder.send_header({"lines": [], "left_out": 0})
        error = failure_of(run)
    assert "what rank 1 sent could not be handled: ZeroDivisionError" in str(error)


@pytest.mark.usefixtures("no_thread_dies")
def test_a_driver_that_cannot_be_understood_stops_a_worker_that_gathers() -> None:
    answers: list[dict[str, Any]] = [{}, {"gathered": 3}, {"gathered": None}]
    for answer in answers:

        def answer_badly(worker: ReportingWorker, _: Any, answer: Any = answer) -> None:
            worker.channel.send_header(answer)

        with run_of(2) as run, RunClient(run.address, 0) as client, ThreadPoolExecutor(1) as pool:
            run.messages["gather"] = ({}, answer_badly)
            with pytest.raises(StoppedError, match="it sent a header that no driver sends"):
                pool.submit(client.gather, {}).result(timeout=60)


def test_who_leaves_before_saying_who_it_is_is_no_rank_that_is_lost(
    run: RunService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Intruder(run):
        pass
    assert eventually(lambda: "disconnected before giving its rank" in caplog.text, 60)
    with RunClient(run.address, 0) as first, RunClient(run.address, 1) as other:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.gather, {"from": 0})
            assert other.gather({"from": 1}) == waiting.result(60)
        assert run.failure is None


def test_a_mistake_in_the_services_thread_ends_the_run_with_its_name(run: RunService) -> None:
    def mistaken() -> None:
        raise KeyError("a mistake")

    with RunClient(run.address, 0):
        run._service.post(mistaken)
        assert "KeyError('a mistake')" in str(failure_of(run))


def test_what_a_worker_prints_waits_at_the_worker_while_nobody_shows_it(
    run: RunService, shown: list[Any]
) -> None:
    sent = 200

    def say_all() -> None:
        for number in range(sent):
            client.send_report({"number": float(number)})
        client.gather({})

    with ThreadPoolExecutor(2) as pool, RunClient(run.address, 0) as client:
        told = pool.submit(say_all)
        with RunClient(run.address, 1) as other:
            for _ in range(sent):
                assert eventually(lambda: run._unshown.qsize() == 1, 60)
                assert run.show_next(60)
                assert run._unshown.qsize() <= 1
            other.gather({})
            told.result(60)
    assert [metrics["number"] for _, metrics in shown] == [*range(sent)]


def test_a_worker_that_waits_to_be_shown_is_stopped_when_the_run_fails(run: RunService) -> None:
    with ThreadPoolExecutor(1) as pool, RunClient(run.address, 0) as client:
        for number in range(200):
            client.send_report({"number": float(number)})
        assert eventually(lambda: run._unshown.qsize() == 1, 60)
        gathered = pool.submit(client.gather, {})
        run.fail(TrainingError("the end"))
        assert isinstance(gathered.exception(10), StoppedError)
