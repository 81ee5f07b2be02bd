"""A worker tries to reach the driver for as long as what stands in the way may pass."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from virtual_time import VirtualClock

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.errors import DisconnectedError
from sparkdl.transport import connecting
from sparkdl.transport.connecting import RETRY_S, ServiceAddress, reach
from sparkdl.transport.connection import ConnectionLostError, NotAnAveragerError, SilenceError

CLOSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
AWAY = OSError(errno.EHOSTUNREACH, "No route to host")


def failing(times: int, cause: Exception) -> tuple[Callable[[], str], list[int]]:
    """An attempt that fails so often before it succeeds; counts how often it was made."""
    made: list[int] = []

    def connect() -> str:
        made.append(1)
        if len(made) <= times:
            raise DisconnectedError(f"rank 0 cannot reach the averager: {cause}") from cause
        return "connected"

    return connect, made


def test_what_may_pass_is_waited_for(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for cause in [
        AWAY,
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        ConnectionLostError("the other end closed the connection"),
        SilenceError("nothing moved for 20 s"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ]:
        with subtests.test(cause=cause):
            caplog.clear()
            connect, made = failing(2, cause)
            assert reach(connect, patience_s=20) == "connected"
            assert len(made) == 3
            assert [record.message for record in caplog.records] == [
                f"rank 0 cannot reach the averager: {cause}; retrying for 20 s"
            ]


def test_what_will_not_pass_is_an_error_at_once(subtests: pytest.Subtests) -> None:
    for cause in [
        CLOSED,
        NotAnAveragerError("the other end is not an averager"),
        OSError("the certificate found there has another SHA-256"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ]:
        with subtests.test(cause=cause):
            connect, made = failing(1, cause)
            with pytest.raises(DisconnectedError, match="rank 0 cannot reach the averager"):
                reach(connect, patience_s=20)
            assert len(made) == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()

    def sleep(seconds: float) -> None:
        clock.passed += seconds

    monkeypatch.setattr(connecting, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    connect, made = failing(10_000, AWAY)
    with pytest.raises(DisconnectedError, match="No route to host"):
        reach(connect, patience_s=60.0)
    assert clock.passed == 60.0
    assert len(made) == 60 / RETRY_S + 1


def test_a_closed_port_is_named(free_port: int) -> None:
    address = ServiceAddress(f"tcp://127.0.0.1:{free_port}", "token", None)
    with pytest.raises(
        DisconnectedError, match=rf"rank 3 cannot reach .*127.0.0.1:{free_port}: .*refused"
    ):
        AveragerClient(address, 3, FullPrecision(), deadline_s=60)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
