"""Interfaces are found by route, name and subnet; a port is held from the moment it is named."""

from __future__ import annotations

import socket

import pytest
from every_row import every

from sparkdl.collective.network import (
    Network,
    interface_addresses,
    interface_of,
    local_address,
)
from sparkdl.errors import ConfigError
from sparkdl.transport.sockets import listen


def test_the_loopback_interface_is_among_those_of_this_host() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"


def test_without_a_choice_it_is_the_interface_that_routes_to_the_driver() -> None:
    assert local_address(Network(driver="127.0.0.1")) == "127.0.0.1"
    assert local_address(Network(driver="localhost")) == "127.0.0.1"


@every("choice", ["lo", "127.0.0.0/8", "127.0.0.1"])
def test_an_interface_is_chosen_by_name_subnet_or_address(choice: str) -> None:
    assert local_address(Network(driver="192.0.2.1", interface=choice)) == "127.0.0.1"


@every("choice", ["nonsense0", "203.0.113.0/24"])
def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are(choice: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{choice}'.*lo \(127\.0\.0\.1\)"):
        local_address(Network(interface=choice))


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        interface_of("203.0.113.7")


def test_a_port_is_held_as_soon_as_it_is_known() -> None:
    with listen("127.0.0.1", None, "it") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


def test_the_first_free_port_of_a_range_is_taken_and_a_full_range_is_an_error() -> None:
    with listen("127.0.0.1", None, "it") as probe:
        first = probe.getsockname()[1]
        if first >= 65_535:
            pytest.skip("the system gave the last port there is")
        with listen("127.0.0.1", (first, first + 1), "it") as second:
            assert second.getsockname()[1] == first + 1
            with pytest.raises(ConfigError, match=f"from {first} to {first + 1} is taken"):
                listen("127.0.0.1", (first, first + 1), "it")


def test_a_driver_that_is_known_by_ipv6_alone_is_reached_by_it() -> None:
    assert local_address(Network(driver="::1")) == "::1"


def test_a_driver_with_addresses_of_both_kinds_is_reached_by_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert local_address(Network(driver="both")) == "127.0.0.1"
