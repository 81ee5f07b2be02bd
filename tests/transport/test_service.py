"""The averager's port, also with encrypted connections."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from by_keyword import open_averager
from every_row import every, every_row
from subprocesses import printed_by
from support.faults import Proxy
from torch import nn
from toys import classification, make_job, mlp, parameters_of, sparkdl_threads

from sparkdl.averager import Averager, AveragerClient
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.driver import run
from sparkdl.errors import ConfigError, DisconnectedError, SparkDLError, TrainingError
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Segment
from sparkdl.testing import _threads, run_world
from sparkdl.transport.channel import HEADER, PAUSE, Channel, Conversation, LeftError
from sparkdl.transport.connection import Connection
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.handshake import MAGIC
from sparkdl.transport.port import Port
from sparkdl.transport.service import Service
from sparkdl.transport.sockets import Certificate, Encrypted

WAIT_S = 20.0
Seen: TypeAlias = "queue.SimpleQueue[tuple[str, str]]"


class Echo:
    """Sends back what it receives, with its own name; see ``service.Peer``."""

    def __init__(self, name: str, service: Service, channel: Channel, seen: Seen) -> None:
        self.name = name
        self.service = service
        self.channel = channel
        self.seen = seen

    def conversation(self, said: dict[str, Any]) -> Conversation:
        while "bye" not in said:
            if "wait" in said:
                self.service.elsewhere(self.channel, self.release.wait, self.channel.wake)
                said = {"waited": (yield PAUSE)}
            if "wrong" in said:
                raise TrainingError("that was wrong")
            if "broken" in said:
                self.service.elsewhere(self.channel, self.read, self.channel.wake)
                yield PAUSE
            self.channel.send_header({self.name: said})
            said = yield HEADER
        self.service.part(self.channel, {"farewell": self.name})

    release = threading.Event()

    def read(self) -> None:
        raise TrainingError("the file is gone")

    def note_heartbeat(self) -> None:
        pass

    def left(self, error: LeftError) -> None:
        self.seen.put((self.name, "left"))

    def failed(self, error: SparkDLError) -> None:
        self.seen.put((self.name, str(error)))
        self.service.close_channel(self.channel)

    def closed(self) -> None:
        self.seen.put((self.name, "closed"))


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Service("127.0.0.1", encrypted=request.param) as opened:
        for name in ("first", "second"):
            opened.handlers[name] = lambda channel, name=name: Echo(name, opened, channel, SEEN)
        while not SEEN.empty():
            SEEN.get()
        Echo.release.clear()
        yield opened
        Echo.release.set()


SEEN: Seen = queue.SimpleQueue()


def connected(service: Service, *headers: dict[str, Any]) -> Connection:
    connection = service.address.connect(0, "the service", WAIT_S)
    for header in headers:
        connection.send_header(header)
    return connection


@every_row(({"second": 1}, "second"), ({"x": 1, "first": 2}, "first"), ({"neither": 1}, "first"))
def test_the_first_header_decides_who_serves_a_connection_from_then_on(
    service: Service, said: dict[str, Any], by: str
) -> None:
    with closing(connected(service, said, {"first": "again"}, {"bye": True})) as connection:
        assert connection.receive_header() == {by: said}
        assert connection.receive_header() == {by: {"first": "again"}}
        assert connection.receive_header() == {"farewell": by}
        with pytest.raises(DisconnectedError):
            connection.receive_header()


def test_a_connection_that_waits_for_something_long_keeps_no_other_waiting(
    service: Service,
) -> None:
    waiting = connected(service, {"first": 0, "wait": True})
    with closing(waiting), closing(connected(service, {"second": 1})) as other:
        assert other.receive_header() == {"second": {"second": 1}}
        Echo.release.set()
        assert waiting.receive_header() == {"first": {"waited": True}}


@pytest.mark.parametrize(
    ("what", "why"), [("wrong", "that was wrong"), ("broken", "the file is gone")]
)
def test_one_that_cannot_be_understood_or_served_ends_alone(
    service: Service, what: str, why: str
) -> None:
    with closing(connected(service, {"second": 1})) as good:
        assert good.receive_header() == {"second": {"second": 1}}
        bad = connected(service, {"first": 1, what: True})
        with closing(bad), pytest.raises(DisconnectedError):
            bad.receive_header()
        assert SEEN.get(timeout=WAIT_S) == ("first", why)
        assert SEEN.get(timeout=WAIT_S) == ("first", "closed")
        good.send_header({"still": "there"})
        assert good.receive_header() == {"second": {"still": "there"}}


def test_the_number_of_threads_is_the_same_for_one_connection_and_for_thirty(
    service: Service,
) -> None:
    connections = [connected(service, {"first": 0})]
    connections[0].receive_header()
    before = len(sparkdl_threads())
    connections += [connected(service, {"second": number}) for number in range(29)]
    for connection in connections[1:]:
        connection.receive_header()
    assert len(sparkdl_threads()) == before
    for connection in connections:
        connection.close()


def test_a_signal_handler_may_post_in_the_middle_of_a_post_to_a_service_that_has_ended() -> None:
    with Service("127.0.0.1") as service:
        pass
    done: list[str] = []
    interrupted, until = 0, time.monotonic() + WAIT_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted += 1
        service.post(lambda: done.append("signal"))
        if time.monotonic() > until:
            raise TimeoutError("a call to post does not return")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(100_000):
            service.post(lambda: done.append("main"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert done.count("main") == 100_000
    assert done.count("signal") == interrupted > 0


def until_closed(connection: Connection) -> None:
    with contextlib.suppress(DisconnectedError):
        while True:
            connection.receive_header()


class Mistaken(Echo):
    """Makes a mistake that no handler expects, also when it is closed."""

    def note_heartbeat(self) -> None:
        raise KeyError("a mistake")

    def closed(self) -> None:
        raise KeyError("another one")


def test_a_mistake_in_closing_one_connection_leaves_no_other_open() -> None:
    with Service("127.0.0.1") as service:
        service.handlers["mistaken"] = lambda channel: Mistaken("x", service, channel, [])
        service.handlers["good"] = lambda channel: Echo("good", service, channel, [])
        good = connected(service, {"good": 1})
        with closing(good):
            assert good.receive_header() == {"good": {"good": 1}}
            with closing(connected(service, {"mistaken": 1})) as bad:
                for each in (bad, good):
                    until_closed(each)


def test_all_are_told_of_a_mistake_and_what_is_posted_after_one_is_still_done() -> None:
    done = threading.Event()
    with Service("127.0.0.1") as service:
        service.handlers["mistaken"] = lambda channel: Mistaken("x", service, channel, [])
        told: queue.SimpleQueue[SparkDLError] = queue.SimpleQueue()
        service.on_break(told.put)
        with closing(connected(service, {"mistaken": 1})):
            mistakes = [told.get(timeout=WAIT_S)]
        service.post(done.set)
        assert done.wait(WAIT_S)
        service.on_break(mistakes.append)  # whoever comes too late is told too
    for error in mistakes:
        assert isinstance(error, TrainingError)
        assert "KeyError('a mistake')" in str(error)
    assert len(mistakes) == 2


def test_one_that_reads_late_gets_every_answer(service: Service) -> None:
    asked = 5_000
    with closing(connected(service)) as connection:
        sender = threading.Thread(
            target=lambda: [connection.send_header({"first": each}) for each in range(asked)]
        )
        sender.start()
        sender.join(0.2)
        for each in range(asked):
            assert connection.receive_header() == {"first": {"first": each}}
        sender.join(WAIT_S)


HANGING = """
import threading
from sparkdl.transport.service import Service
started = threading.Event()
def hang():
    started.set()
    threading.Event().wait()
with Service("127.0.0.1") as service:
    service.elsewhere(None, hang, lambda done: None)
    assert started.wait(20)
print("ended")
"""
FINISHING = """
import threading, time
from sparkdl.transport import daemon_pool
from sparkdl.transport.daemon_pool import DaemonPool
daemon_pool.EXIT_S = 60.0
started = threading.Event()
def finish():
    started.set()
    time.sleep(0.3)
    print("finished", flush=True)
pool = DaemonPool(1, "sparkdl-test")
pool.submit(finish)
assert started.wait(20)
"""


@pytest.mark.gate
def test_a_job_that_hangs_does_not_keep_the_process_from_ending() -> None:
    assert printed_by("-c", HANGING, timeout=60) == "ended\n"


def test_a_job_that_is_about_to_end_may_do_so_before_the_process() -> None:
    assert printed_by("-c", FINISHING, timeout=60) == "finished\n"


def test_a_job_that_hangs_keeps_no_other_waiting_while_there_are_threads() -> None:
    pool, release = DaemonPool(2, "sparkdl-test"), threading.Event()
    hanging = pool.submit(lambda: release.wait(WAIT_S))
    assert [pool.submit(lambda each=each: each).result(WAIT_S) for each in range(9)] == [*range(9)]
    release.set()
    assert hanging.result(WAIT_S)
    pool.close()


def test_it_has_no_more_threads_than_it_may_and_none_once_closed() -> None:
    pool, together = DaemonPool(3, "sparkdl-three"), threading.Barrier(3)
    jobs = [pool.submit(lambda: together.wait(WAIT_S)) for _ in range(9)]
    assert {job.result(WAIT_S) for job in jobs} == {0, 1, 2}
    threads = [each for each in sparkdl_threads() if each.name.startswith("sparkdl-three")]
    assert len(threads) == 3
    pool.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@every("cancels", [False, True])
def test_what_was_not_begun_is_still_done_after_the_close_unless_cancelled(cancels: bool) -> None:
    pool, release = DaemonPool(1, "sparkdl-test"), threading.Event()
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(WAIT_S)

    hanging = pool.submit(hang)
    waiting = pool.submit(lambda: "done")
    assert begun.wait(WAIT_S)
    pool.close(cancel=cancels)
    release.set()
    hanging.result(WAIT_S)
    if cancels:
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
    else:
        assert waiting.result(WAIT_S) == "done"


LAYOUT = (Segment("parameters", torch.float32, 5),)
SILENCE_S = 10.0


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate()


def test_a_worker_does_not_talk_to_a_man_in_the_middle_with_a_certificate_of_his_own() -> None:
    with open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, tls=True) as averager:
        seen: list[bytes] = []

        def listen(met: Connection) -> None:
            seen.append(met._receive(1))

        middle = Port("127.0.0.1", averager.address.token, listen, encrypted=True)
        try:
            address = replace(averager.address, port=middle.number)
            told = rf"rank 0 cannot reach .*SHA-256 {middle.fingerprint}, but .* intercepting"
            with pytest.raises(DisconnectedError, match=told):
                AveragerClient(address, 0, FULL_PRECISION)
        finally:
            middle.close()
    assert seen == []


@pytest.mark.parametrize("tls", [True, False], ids=["encrypted", "plain"])
def test_an_end_that_encrypts_and_one_that_does_not_never_meet(
    tls: bool, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.transport.connection.INTRODUCE_S", 0.5)
    with open_averager(
        LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, deadline_s=5, tls=tls
    ) as averager:
        other = replace(averager.address, fingerprint=None if tls else certificate.fingerprint)
        with pytest.raises(DisconnectedError, match="rank 0"):
            AveragerClient(other, 0, FULL_PRECISION, deadline_s=1)
        assert averager.losses == []


def test_without_the_package_for_certificates_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'sparkdl-torch\[tls\]'"):
        Port("127.0.0.1", "token", lambda met: None, encrypted=True)


def bytes_on_the_wire(model: nn.Module, tls: bool, folder: Path) -> tuple[bytes, dict[str, Any]]:
    """What passes between workers and averager in a training, and the parameters it ends with."""
    job = make_job(model, epochs=2, tls=tls)
    shards = classification([12, 12]).shards()
    start = _threads(job, shards, folder)
    seen = bytearray()

    @contextlib.contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with Proxy(averager.address, on_bytes=seen.extend) as proxy:
            through: Any = SimpleNamespace(address=proxy.address, fail=averager.fail)
            with start(through):
                yield

    module = run(job, 2, launch).module
    return bytes(seen), parameters_of(module)


def test_nothing_readable_passes_between_workers_and_averager(tmp_path: Path) -> None:
    model = mlp()
    plain, expected = bytes_on_the_wire(model, False, tmp_path)
    encrypted, parameters = bytes_on_the_wire(model, True, tmp_path)
    # What was sent last are the final parameters, in the model's own float64.
    secrets = [expected["0.bias"].tobytes(), b'"window"', b'"shard"', MAGIC]
    assert [secret in plain for secret in secrets] == [True] * 4
    assert [secret in encrypted for secret in secrets] == [False] * 4
    assert all((parameters[name] == expected[name]).all() for name in expected)


def test_rows_that_are_dealt_anew_are_encrypted_and_the_result_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[bool] = []
    receive = Encrypted.recv_into

    def counted(self: Encrypted, *arguments: Any) -> int:
        used.append(True)
        return receive(self, *arguments)

    model = mlp()

    def train(tls: bool) -> dict[str, Any]:
        job = make_job(model, epochs=3, tls=tls, feed=FeedOptions(reshuffle_every=1))
        return parameters_of(run_world(job, classification([9, 14]).shards()).module)

    expected = train(False)
    monkeypatch.setattr(Encrypted, "recv_into", counted)
    found = train(True)
    assert used
    assert all((found[name] == expected[name]).all() for name in expected)
