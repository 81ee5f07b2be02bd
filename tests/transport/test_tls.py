"""Encrypted connections: nothing to read on the wire, no other certificate, no other result."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from support.faults import Proxy
from torch import nn
from toys import classification, make_job, mlp, parameters_of

from sparkdl.averager import Averager, AveragerClient
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.driver import run
from sparkdl.errors import ConfigError, DisconnectedError
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Segment
from sparkdl.testing import _threads, run_world
from sparkdl.transport import connection
from sparkdl.transport.connection import Connection
from sparkdl.transport.handshake import MAGIC
from sparkdl.transport.port import Port
from sparkdl.transport.sockets import Certificate, Encrypted

LAYOUT = (Segment("parameters", torch.float32, 5),)
SILENCE_S = 10.0


def test_a_worker_does_not_talk_to_a_man_in_the_middle_with_a_certificate_of_his_own() -> None:
    with open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, tls=True) as averager:
        seen: list[bytes] = []

        def listen(met: Connection) -> None:
            seen.append(met._receive(1))

        port = Port("127.0.0.1", averager.address.token, listen, encrypted=True)
        with contextlib.closing(port) as middle:
            address = replace(averager.address, port=middle.number)
            told = rf"rank 0 cannot reach .*SHA-256 {middle.fingerprint}, but .* intercepting"
            with pytest.raises(DisconnectedError, match=told):
                AveragerClient(address, 0, FULL_PRECISION)
    assert seen == []


@pytest.mark.parametrize("tls", [True, False], ids=["encrypted", "plain"])
def test_an_end_that_encrypts_and_one_that_does_not_never_meet(
    tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "INTRODUCE_S", 0.5)
    ones, options = [torch.ones(5)], {"deadline_s": 5, "tls": tls}
    with open_averager(LAYOUT, ones, 1, FULL_PRECISION, **options) as averager:
        other = replace(averager.address, fingerprint=None if tls else Certificate().fingerprint)
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
