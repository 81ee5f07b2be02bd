"""``spark.sparkdl.driver.port``: where the driver serves its workers."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.network import driver_ports
from sparkdl.transport.service import Service


def ports(text: str | None) -> tuple[int, int] | None:
    conf = {"spark.sparkdl.driver.port": text}
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))
    return driver_ports(session)


def test_it_is_a_port_or_a_range_or_any() -> None:
    assert [ports(text) for text in (None, "", "40000", " 40000 - 40100 ")] == [
        None,
        None,
        (40000, 40000),
        (40000, 40100),
    ]
    for text in ("0", "70000", "2-1", "eth1"):
        with pytest.raises(ConfigError, match=r"spark\.sparkdl\.driver\.port must be .* got '"):
            ports(text)


def test_a_service_takes_it_again_and_names_the_setting_if_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(ConfigError, match=r"taken on 127.* Widen spark\.sparkdl\.driver\.port"):
            Service("127.0.0.1", ports=(port, port))
    for _ in range(2):  # as when all workers start again
        with Service("127.0.0.1", ports=(port, port)) as service:
            assert service.address.uri == f"tcp://127.0.0.1:{port}"
