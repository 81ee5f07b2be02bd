"""The shorter way between processes of one machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from virtual_time import VirtualClock
from waiting import WAIT_S

from sparkdl.errors import StoppedError
from sparkdl.transport import local
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

pytestmark = pytest.mark.skipif(not local.HAS_LOCAL_NAMES, reason="only Linux has local names")

HOST, TOKEN = "127.0.0.1", "the job's secret"


@pytest.fixture
def port() -> Iterator[Port]:
    with closing(Port(HOST, TOKEN, Connection.close, now=VirtualClock())) as port:
        yield port


def name_of(host: str, port: int) -> bytes:
    name = local.name_of(host, port, TOKEN)
    assert name is not None
    return name


def family_of(port: Port, host: str = HOST) -> int:
    address = ServiceAddress(host, port.number, TOKEN, port.fingerprint)
    with closing(address.connect(0, "the port", WAIT_S)) as connection:
        return connection._socket.family


def test_a_port_on_this_machine_is_reached_without_tcp_where_there_are_local_names(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert family_of(port) == socket.AF_UNIX
    monkeypatch.setattr(local, "HAS_LOCAL_NAMES", False)
    assert family_of(port) == socket.AF_INET


def test_another_host_token_port_kernel_or_network_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines may well give the same number to two ports of one job."""
    names = [local.name_of(*of) for of in [("a", 1, "t"), ("b", 1, "t"), ("a", 2, "t")]]
    names.append(local.name_of("a", 1, "u"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(local, "_NETWORK", tmp_path)
        names.append(local.name_of("a", 1, "t"))
    (tmp_path / "boot_id").write_text("another kernel's")
    monkeypatch.setattr(local, "_BOOT", tmp_path / "boot_id")
    names.append(local.name_of("a", 1, "t"))
    assert None not in names
    assert len(set(names)) == len(names) == 6


def test_where_the_kernel_does_not_tell_the_network_tcp_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "_NETWORK", tmp_path / "missing")
    with closing(Port(HOST, TOKEN, Connection.close)) as port:
        assert family_of(port) == socket.AF_INET


def test_a_host_that_is_not_the_one_advertised_however_it_is_spelled_is_reached_by_tcp() -> None:
    for advertised, family in (("LocalHost", socket.AF_UNIX), (HOST, socket.AF_INET)):
        with closing(Port(HOST, TOKEN, Connection.close, advertised_host=advertised)) as port:
            assert family_of(port, "localhost") == family


def test_who_listens_under_the_name_without_the_token_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of this user's own processes, for others the kernel tells apart."""
    monkeypatch.setattr(local, "listen", lambda *_: None)
    with closing(Port(HOST, TOKEN, Connection.close)) as port:
        monkeypatch.undo()
        monkeypatch.setattr(local, "name_of", lambda *_: b"\0sparkdl-" + TOKEN.encode())
        with closing(Port(HOST, "guessed", Connection.close)):
            assert family_of(port) == socket.AF_INET


def test_a_token_that_is_not_the_ports_is_told_as_such(port: Port) -> None:
    with pytest.raises(StoppedError, match="do not have the same token"):
        ServiceAddress(HOST, port.number, "another job's", None).connect(0, "the port", WAIT_S)


def test_an_encrypted_port_is_reached_by_no_other_way() -> None:
    with closing(Port(HOST, TOKEN, Connection.close, encrypted=True)) as port:
        assert family_of(port) == socket.AF_INET
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(name_of(HOST, port.number))


def test_the_name_does_not_show_the_token() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name_of(HOST, 1))
        assert TOKEN.encode() not in listener.getsockname()


def test_a_name_at_which_nobody_is_let_in_is_passed_over() -> None:
    """As of a driver that is stopped while many workers come; a blocking socket would wait."""
    waiting: list[socket.socket] = []
    listener = local.listen(HOST, 1, TOKEN, backlog=0)
    assert listener is not None
    with listener:
        while (connected := local.connect((HOST, 1), TOKEN, WAIT_S)) is not None:
            waiting.append(connected)
            assert len(waiting) < 10
        for connected in waiting:
            connected.close()
    assert waiting
