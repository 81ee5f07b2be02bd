"""Callers that do not know the token, of a port alone and of one on which a training runs."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from calling import HELLO_BYTES, REFUSALS, Call, any_way, framed, mutated_bytes
from fuzzer import Fault, Target, require_threads_gone
from toys import classification, make_job, mlp

from sparkdl.averager.service.server import Averager
from sparkdl.driver import Outcome, run
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import _threads
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

PATIENCE_S = 60.0
"""Seconds for the next training to begin, and for the last one to end."""
LEGACY_HELLO = bytes.fromhex(
    "160301002f0100002b0303" + "00" * 32 + "00" + "0002" + "1301" + "0100" + "0000"
)
"""The beginning of a TLS handshake, as much as can be written without a library."""


class Handshake(Target):
    """Most callers must be sent away with nothing; those that prove the token must be served."""

    name = "handshake"

    def attempt(self, draw: random.Random) -> bool:
        """One port and one caller."""
        token = secrets.token_urlsafe(32)
        encrypted = draw.random() < 0.25
        port = Port("127.0.0.1", token, _serve, encrypted=encrypted)
        try:
            place = ServiceAddress("127.0.0.1", port.number, token, port.fingerprint)
            welcome, answer = call(draw, place)
            if welcome is not None and answer != welcome + framed({"served": True}):
                raise Fault(f"{len(answer)} bytes other than those due to a caller with the token")
            if welcome is None and answer not in REFUSALS:
                raise Fault(f"an answer of {len(answer)} bytes to a stranger")
        finally:
            port.close()
        require_threads_gone()
        return welcome is not None


def _serve(connection: Connection) -> None:
    connection.send_header({"served": True})


def call(draw: random.Random, place: ServiceAddress) -> tuple[bytes | None, bytes]:
    """Call a port, mostly without a valid proof of its token.

    Args:
        draw: the source of chance.
        place: where the port is, and its token.

    Returns:
        What the port's answer has to begin with if the caller proved the token after all, else
        None; and what came back after the port's first word.
    """
    kind = draw.randrange(13)
    if place.fingerprint is not None and kind <= 4:
        return None, _without_encryption(draw, place)
    with Call(place, any_way(draw)) as line:
        heard = line.hello()
        # One call in ten ignores what the port says.
        hello = heard if draw.random() < 0.9 else bytes(HELLO_BYTES)
        right = line.proof(hello)
        said = {
            0: lambda: draw.randbytes(draw.choice([0, 1, 63, 64, 65, 300, 5000])),
            1: lambda: bytes(draw.choice([1, 32, 64, 100])),
            2: lambda: hello * draw.choice([1, 2, 10]),
            3: lambda: line.proof(hello, draw.choice(["", "wrong", place.token[:-1]])),
            4: lambda: right[: draw.randrange(64)],
            5: lambda: line.proof(mutated_bytes(draw, hello)),
            6: lambda: _flipped(draw, right),
            7: lambda: line.reflected(hello) * 2,
            8: lambda: b"GET / HTTP/1.1\r\n\r\n" + draw.randbytes(64),
            9: lambda: framed({"join": 0, "host": "h"}) * draw.choice([1, 10]),
            10: lambda: right[32:] + right[:32],
            11: lambda: line.proof(hello, channel=_another_way(draw, place)),
            12: lambda: right,
        }[kind]()
        proved = len(said) >= 64 and said[:32] == line.proof(hello)[:32]
        # Nobody knows the answer to a challenge that was never heard.
        if kind in (0, 1, 2, 8, 9) or hello == bytes(HELLO_BYTES):
            proved = False
        if draw.random() < 0.2:
            at = draw.randrange(len(said) + 1)
            line.send(said[:at])
            said = said[at:]
        line.send(said)
        return line.welcome if proved else None, line.answer()


def _another_way(draw: random.Random, place: ServiceAddress) -> bytes:
    """A channel that no call to this port can have."""
    others = [b"", b"local", b"local\0sparkdl-" + b"0" * 64]
    return draw.choice([*others, b"tls" if place.fingerprint is None else b"tcp"])


def _flipped(draw: random.Random, proof: bytes) -> bytes:
    at = draw.randrange(32)
    return proof[:at] + bytes([proof[at] ^ 1 << draw.randrange(8)]) + proof[at + 1 :]


def _without_encryption(draw: random.Random, place: ServiceAddress) -> bytes:
    """Speak in the clear, or in what looks like TLS, to a port that encrypts."""
    with Call(place, bare=True) as line:
        said = draw.choice([LEGACY_HELLO, draw.randbytes(200), b"", LEGACY_HELLO[:20], bytes(5)])
        line.send(mutated_bytes(draw, said, draw.choice([0, 1, 3])))
        # What TLS itself says about a broken handshake is not an answer of the project's.
        return line.answer().removeprefix(b"\x15\x03")[:0]


class Trainings(Target):
    """Trainings one after another in a thread; each input is a stranger who calls the current one.

    Each has to end with the same bits as one that nobody calls.
    """

    name = "trainings"

    def __enter__(self) -> Trainings:
        self._folder = self.folder()
        self._alone = self._bits(_train(self._folder, lambda averager: None))
        self._averager: Averager | None = None
        self._changed = threading.Condition()
        self._over = False
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._train_on, name="trainings", daemon=True)
        self._thread.start()
        self.callback(self._end)
        return self

    def _end(self) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)

    def attempt(self, draw: random.Random) -> bool:
        """One stranger; it may have to wait for the next training."""
        until = time.monotonic() + PATIENCE_S
        while not self._wrong and time.monotonic() < until:
            with self._changed:
                self._changed.wait_for(lambda: self._averager is not None, timeout=1.0)
                averager = self._averager
            if averager is None:
                continue
            try:
                place = averager.address
                while True:
                    welcome, answer = call(draw, place)
                    if welcome is None:  # a caller with the token may well end the run
                        break
            except OSError:
                continue  # it ended between two checks
            if answer not in REFUSALS:
                raise Fault("a stranger was answered")
            return False
        raise Fault("a training beside strangers went wrong", self._wrong)

    def _train_on(self) -> None:
        while not self._over:
            try:
                bits = self._bits(_train(self._folder, self._show))
            except Exception as error:
                self._wrong.append(repr(error))
                return
            finally:
                self._show(None)
            if not all(torch.equal(a, b) for a, b in zip(bits, self._alone, strict=True)):
                self._wrong.append("other bits than without strangers")
                return

    def _show(self, averager: Averager | None) -> None:
        with self._changed:
            self._averager = averager
            self._changed.notify_all()

    @staticmethod
    def _bits(outcome: Outcome) -> list[torch.Tensor]:
        return list(outcome.module.state_dict().values())


def _train(folder: Path, show: Callable[[Averager], None]) -> Outcome:
    job = make_job(mlp(), strategy=ParameterAveraging(2), epochs=30, deadline_s=60.0)
    start = _threads(job, classification([40, 40]).shards(20), folder)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with start(averager):
            show(averager)
            yield

    return run(job, 2, launch)
