"""The shorter way between processes of one machine."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest
import torch

from sparkdl.averager import local
from sparkdl.averager.connection import Connection
from sparkdl.averager.local import connect
from sparkdl.averager.port import Port

pytestmark = pytest.mark.skipif(not local.HAS_LOCAL_NAMES, reason="only Linux has local names")

HOST, TOKEN = "127.0.0.1", "the job's secret"
DEADLINE_S = 5.0


@pytest.fixture
def arrivals() -> queue.SimpleQueue[Connection]:
    return queue.SimpleQueue()


@pytest.fixture
def port(arrivals: queue.SimpleQueue[Connection]) -> Iterator[Port]:
    port = Port(HOST, TOKEN, lambda connection: echo(connection, arrivals))
    yield port
    port.close()


def echo(connection: Connection, arrivals: queue.SimpleQueue[Connection]) -> None:
    arrivals.put(connection)
    values = torch.empty(300_000)
    connection.receive_values(values)
    connection.send_values(values)


def family_of(port: Port, host: str = HOST, token: str = TOKEN) -> int:
    connected = connect((host, port.number), token, port.fingerprint, DEADLINE_S)
    connected.close()
    return connected.family


def test_a_port_on_this_machine_is_reached_without_tcp(port: Port) -> None:
    assert family_of(port) == socket.AF_UNIX


def test_values_arrive_as_they_were_sent(port: Port) -> None:
    sent, received = torch.randn(300_000), torch.empty(300_000)
    connected = connect((HOST, port.number), TOKEN, None, DEADLINE_S)
    connection = Connection(connected, DEADLINE_S)
    assert connection.introduce(TOKEN)
    connection.send_values(sent)
    connection.receive_values(received)
    connection.close()
    assert connected.family == socket.AF_UNIX
    assert torch.equal(sent, received)


def test_without_local_names_tcp_is_used(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HAS_LOCAL_NAMES", False)
    assert family_of(port) == socket.AF_INET


@pytest.mark.parametrize(("host", "token"), [("localhost", TOKEN), (HOST, "another job's")])
def test_another_host_or_token_has_another_name(port: Port, host: str, token: str) -> None:
    """Two machines may well give the same number to two ports of one job."""
    assert family_of(port, host, token) == socket.AF_INET


def test_a_host_is_the_same_however_it_is_spelled() -> None:
    port = Port(HOST, TOKEN, Connection.close, advertised_host="LocalHost")
    try:
        assert family_of(port, "localhost") == socket.AF_UNIX
    finally:
        port.close()


def test_who_knows_the_name_but_not_the_token_is_not_let_in(
    port: Port, arrivals: queue.SimpleQueue[Connection]
) -> None:
    connected = connect((HOST, port.number), TOKEN, None, DEADLINE_S)
    stranger = Connection(connected, DEADLINE_S)
    assert not stranger.introduce("guessed")
    stranger.close()
    assert connected.family == socket.AF_UNIX
    assert arrivals.empty()


def test_an_encrypted_port_is_reached_by_no_other_way() -> None:
    port = Port(HOST, TOKEN, Connection.close, encrypted=True)
    try:
        assert family_of(port) == socket.AF_INET
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(local._name(HOST, port.number, TOKEN))
    finally:
        port.close()


def test_the_name_does_not_show_the_token() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(local._name(HOST, 1, TOKEN))
        assert TOKEN.encode() not in listener.getsockname()


def test_a_closed_port_leaves_no_name_behind() -> None:
    port = Port(HOST, TOKEN, Connection.close)
    port.close()
    with pytest.raises(ConnectionRefusedError):
        connect((HOST, port.number), TOKEN, None, DEADLINE_S)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(local._name(HOST, port.number, TOKEN))


def test_a_name_at_which_nobody_is_let_in_is_passed_over() -> None:
    """As of a driver that is stopped while many workers come; a blocking socket would wait."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        waiting = []
        with local.listen_locally(HOST, port, TOKEN, backlog=0):
            try:
                while not waiting or waiting[-1].family == socket.AF_UNIX:
                    assert len(waiting) < 10
                    waiting.append(connect((HOST, port), TOKEN, None, DEADLINE_S))
            finally:
                for connected in waiting:
                    connected.close()
    assert len(waiting) > 1
