"""Calling the project's ports by hand: bytes over TCP, a local socket or TLS, made wrong or not."""

from __future__ import annotations

import contextlib
import copy
import hmac
import json
import random
import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fuzzer import Stuck, stacks

from sparkdl.transport import local
from sparkdl.transport.connecting import ServiceAddress

T = TypeVar("T")

RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@open": '{"a":' * 60_000,
    "@digits": "9" * 5_000,
    "@large": "9" * 400,
    "@small": "-" + "9" * 4_000,
    "@surrogate": '"\\ud800"',
    "@twice": '{"rank": 0, "rank": 1}',
    "@infinity": "1e999",
}
"""JSON that ``json.dumps`` never writes, by the text that stands for it."""
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 256),
    *((1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 1 << 64, 1 << 70),
    *(0.5, -0.0, 1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "x" * 1000, "\x00", "\n\r\x1b[2J", "é\U0001f600", "../../x", "/dev/zero", "."),
    *([], {}, [[]], [[[[]]]], {"": {}}, [None], [0] * 1000, {"a": [{"b": [{}]}]}),
    *RAW,
]
_SIZES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def as_text(value: Any) -> str:
    """The JSON of a value that may contain the names of ``RAW``."""
    text = json.dumps(value)
    if '"@' in text:
        for name, raw in RAW.items():
            text = text.replace(f'"{name}"', raw)
    return text


def mutated(draw: random.Random, value: T, times: int = 1) -> T:
    """A copy of a JSON value with some of its nodes changed.

    Args:
        draw: the source of chance.
        value: dicts, lists, text, numbers.
        times: the number of changes.
    """
    whole = [copy.deepcopy(value)]
    for _ in range(times):
        container, key = draw.choice(_nodes(whole))
        _change(draw, container, key, whole)
    return whole[0]


def _nodes(container: Any) -> list[tuple[Any, Any]]:
    """Every node below a container, as its immediate container and its key there."""
    found: list[tuple[Any, Any]] = []
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        found.append((container, key))
        if isinstance(container[key], dict | list):
            found += _nodes(container[key])
    return found


def _change(draw: random.Random, container: Any, key: Any, whole: Any) -> None:
    old = container[key]
    kind = draw.randrange(9)
    if kind <= 2:
        container[key] = copy.deepcopy(draw.choice(ODD))
    elif kind == 3 and container is not whole:
        del container[key]
    elif kind == 4:
        other, where = draw.choice(_nodes(whole))
        container[key] = copy.deepcopy(other[where])
    elif kind == 5:
        container[key] = [old] if draw.random() < 0.5 else {str(key): old}
    elif kind == 6 and container is not whole:
        new = draw.choice(["", "x", "pickle", "import", f"{key} "])
        if isinstance(container, dict):
            container[new] = container.pop(key) if draw.random() < 0.5 else copy.deepcopy(old)
        else:
            container += [copy.deepcopy(old)] * draw.choice([1, 2, 100])
    else:
        container[key] = _nudged(draw, old)


def _nudged(draw: random.Random, old: Any) -> Any:
    """A neighbouring value of the same type, if the type has such values."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice([old + 1, old - 1, -old, old * 1000, old << 32, float(old), str(old)])
    if isinstance(old, float):
        return draw.choice([-old, old * 1e308, old / 3, int(old) if abs(old) < 1e9 else 0])
    if isinstance(old, str):
        at = draw.randrange(len(old) + 1)
        inside = draw.choice(["", "x", ".", ":", "/", "\x00", "é", "0"])
        return old[:at] + inside + old[at + draw.randrange(3) :]
    if isinstance(old, list):
        return draw.choice([old[::-1], old[:-1], old + old, old[1:]])
    if isinstance(old, dict):
        return list(old.values())
    return 0


def mutated_bytes(draw: random.Random, octets: bytes, times: int = 1) -> bytes:
    """A copy of some bytes with bits, numbers or pieces changed."""
    changed = bytearray(octets)
    for _ in range(times):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice([1, 2, 4, 8, 64, 1000]))
        kind = draw.randrange(8)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            del changed[at:to]
        elif kind == 2:
            changed[at:at] = changed[at:to] or b"\x00"
        elif kind == 3:
            changed[at:to] = draw.randbytes(to - at)
        elif kind == 4:
            changed[at:at] = draw.randbytes(draw.choice([1, 8, 100]))
        elif kind == 5:
            width, order = draw.choice([1, 2, 4, 8]), draw.choice(["big", "little"])
            number = draw.choice(_SIZES) & ((1 << 8 * width) - 1)
            changed[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        elif at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def mutated_order(draw: random.Random, items: Sequence[T]) -> list[T]:
    """The items with one left out, repeated, swapped or moved, or the list cut short."""
    changed = list(items)
    if not changed:
        return changed
    at, other = draw.randrange(len(changed)), draw.randrange(len(changed))
    kind = draw.randrange(5)
    if kind == 0:
        del changed[at]
    elif kind == 1:
        changed[at:at] = [changed[at]] * draw.choice([1, 2, 5])
    elif kind == 2:
        changed[at], changed[other] = changed[other], changed[at]
    elif kind == 3:
        changed.insert(at, changed[other])
    else:
        del changed[at:]
    return changed


def number_of_changes(draw: random.Random) -> int:
    """Mostly one, so that reading gets as far as the change; none in one input out of ten."""
    return draw.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])


PATIENCE_S = 5.0
"""Seconds that a port has to answer or to hang up."""
HELLO_BYTES = 40
"""A word of 8 bytes and a challenge of 32."""
PROOF_BYTES = 32
REFUSALS = (b"", bytes(PROOF_BYTES))
"""The only answers that a caller may get that has not proved that it knows the token."""
HEADER, VALUES = 1, 2
Message = Mapping[str, Any] | bytes
"""A header, or the bytes of values."""
_ADDED: list[Message] = [b"", bytes(4), bytes(1000), {}, {"waiting": True}]


class Call:
    """One connection to a port; a context manager.

    Args:
        place: where the port is.
        over: ``tcp`` or ``local``; a port that encrypts is always called over TLS.
        bare: whether to leave out TLS even then.
    """

    def __init__(self, place: ServiceAddress, over: str = "tcp", *, bare: bool = False) -> None:
        self._token = place.token
        address = place.host_and_port
        self.line: Any = None
        if over == "local" and place.fingerprint is None:
            self.line = local.connect(address, place.token, PATIENCE_S)
            if self.line is not None:
                self._channel = b"local" + self.line.getpeername()
        if self.line is None:
            self.line = socket.create_connection(address, timeout=PATIENCE_S)
            self.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channel = b"tcp" if place.fingerprint is None else b"tls"
        self.line.settimeout(PATIENCE_S)
        if place.fingerprint is not None and not bare:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.line = context.wrap_socket(self.line)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def hello(self) -> bytes:
        """What the port says first; shorter if it hangs up."""
        return self._receive(HELLO_BYTES)

    def proof(self, hello: bytes, token: str | None = None, channel: bytes | None = None) -> bytes:
        """The proof that this end knows the token, and a challenge of its own.

        Args:
            hello: what the port has said.
            token: a token to use instead of the port's.
            channel: a channel to claim instead of this call's.
        """
        return self._proved(b"worker", hello[-32:], token, channel) + bytes(32)

    def reflected(self, hello: bytes) -> bytes:
        """The proof that the port itself would give, for its own challenge."""
        return self._proved(b"averager", hello[-32:])

    @property
    def welcome(self) -> bytes:
        """What the port has to answer first to a caller that has proved the token."""
        return self._proved(b"averager", bytes(32))

    def _proved(
        self, role: bytes, challenge: bytes, token: str | None = None, channel: bytes | None = None
    ) -> bytes:
        key = (self._token if token is None else token).encode()
        way = self._channel if channel is None else channel
        return hmac.digest(key, role + way + challenge, "sha256")

    def send(self, octets: bytes) -> None:
        """Send bytes; the other end may have hung up."""
        with contextlib.suppress(OSError):
            self.line.sendall(octets)

    def converse(self, said: Sequence[Said]) -> None:
        """Send messages after the proof, each once the answers due before it have come.

        A caller that is told to stop sends the rest all the same.

        Raises:
            Stuck: for ``PATIENCE_S``, no answers came and the other end did not hang up.
        """
        try:
            listens = len(self._receive(PROOF_BYTES)) == PROOF_BYTES
            for each in said:
                self.send(each.octets)
                listens = listens and self._take(each.answers)
        except TimeoutError:
            raise Stuck("a worker was neither answered nor left", stacks()) from None

    def _take(self, answers: int) -> bool:
        """Take this many messages, not counting those that only say that others are waited for."""
        while answers:
            prefix = self._receive(5)
            if len(prefix) < 5:
                return False
            kind, length = struct.unpack("!BI", prefix)
            body = self._receive(length)
            header = json.loads(body) if kind == HEADER else {}
            if "stopped" in header:
                return False
            answers -= not header.keys() & {"waiting", "checkpoint"}
        return True

    def _receive(self, size: int) -> bytes:
        """``size`` bytes; fewer at the end."""
        octets = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while len(octets) < size and (more := self.line.recv(size - len(octets))):
                octets += more
        return octets

    def answer(self, at_most: int = 1 << 20) -> bytes:
        """Stop sending, and take what comes until the other end hangs up.

        Raises:
            Stuck: for ``PATIENCE_S``, it neither sent anything nor hung up.
        """
        with contextlib.suppress(OSError):
            # The plain socket's shutdown, because the encrypted socket's own would drop the keys.
            socket.socket.shutdown(self.line, socket.SHUT_WR)
        octets = bytearray()
        try:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                while (more := self.line.recv(1 << 16)) and len(octets) < at_most:
                    octets += more
            # TLS may report its end before the port has noticed it.
            with contextlib.suppress(ConnectionError):
                while socket.socket.recv(self.line, 1 << 16):
                    pass
        except TimeoutError:
            raise Stuck("a port neither answered nor hung up", stacks()) from None
        return bytes(octets)


def any_way(draw: random.Random) -> str:
    """One of the ways to reach a port without encryption."""
    return draw.choice(["tcp", "local"])


def framed(message: Any) -> bytes:
    """A message as it travels; what is neither bytes nor a dict, as if it were a header."""
    if isinstance(message, bytes):
        return struct.pack("!BI", VALUES, len(message)) + message
    octets = as_text(message).encode()
    return struct.pack("!BI", HEADER, len(octets)) + octets


def misframed(draw: random.Random, message: Message) -> bytes:
    """A message whose kind or length is not what its prefix says."""
    octets = framed(message)
    kind, length = struct.unpack("!BI", octets[:5])
    kind = draw.choice([HEADER, VALUES, 0, 3, 255])
    wrong = [0, 1, length + 1, max(0, length - 1), 16 << 20, (16 << 20) + 1, (1 << 32) - 1]
    length = draw.choice([length, *wrong])
    return struct.pack("!BI", kind, length) + octets[5:]


@dataclass(frozen=True)
class Said:
    """Something to send, and how many messages have to come back before anything follows."""

    message: Message | bytearray
    """A bytearray is sent as it is, and need not be a message at all."""
    answers: int = 0

    @property
    def octets(self) -> bytes:
        """The bytes as they travel."""
        return bytes(self.message) if isinstance(self.message, bytearray) else framed(self.message)


def conversation(draw: random.Random, messages: Sequence[Message]) -> tuple[bytes, bool]:
    """What a worker sends after its proof, all at once, made wrong.

    Args:
        draw: the source of chance.
        messages: as a worker sends them.

    Returns:
        The bytes, and whether anything is wrong with them.
    """
    said, wrong = dialogue(draw, [Said(message) for message in messages])
    octets = b"".join(each.octets for each in said)
    if wrong and draw.random() < 0.05:
        octets = mutated_bytes(draw, octets, draw.choice([1, 5, 50]))
    return octets, wrong


def dialogue(draw: random.Random, said: Sequence[Said]) -> tuple[list[Said], bool]:
    """What a worker sends after its proof, message by message, made wrong.

    Args:
        draw: the source of chance.
        said: as a worker sends it.

    Returns:
        The messages to send, and whether anything is wrong with them.
    """
    changes = number_of_changes(draw)
    changed = list(said)
    for _ in range(changes):
        kind = draw.randrange(10)
        at = draw.randrange(len(changed)) if changed else 0
        if kind == 2:
            changed[at:at] = [Said(draw.choice(_ADDED))]
        elif not changed or kind <= 1:
            changed = mutated_order(draw, changed)
        else:
            changed[at] = _mutated(draw, kind, changed[at])
    return changed, bool(changes)


def _mutated(draw: random.Random, kind: int, said: Said) -> Said:
    message, answers = said.message, said.answers
    if answers and draw.random() < 0.1:
        return Said(message)  # does not wait for the answers
    if isinstance(message, bytearray):
        return Said(message + draw.randbytes(3), answers)
    if kind == 3:
        return Said(bytearray(misframed(draw, message)), answers)
    if kind == 4:
        return Said(bytearray(mutated_bytes(draw, framed(message))), answers)
    if isinstance(message, bytes):
        return Said(mutated_bytes(draw, message), answers)
    wrong = mutated(draw, dict(message), draw.choice([1, 1, 1, 2]))
    return Said(wrong if isinstance(wrong, dict) else bytearray(framed(wrong)), answers)
