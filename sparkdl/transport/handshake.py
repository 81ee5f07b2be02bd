"""How both ends of a connection prove that they know the job's token without revealing it.

Challenge and response with HMAC-SHA256, as in RFC 2195:

    averager -> worker   MAGIC, challenge a
    worker -> averager   HMAC(token, "worker", channel, a), challenge w
    averager -> worker   HMAC(token, "averager", channel, w), or REFUSAL

A proof is valid on the channel that it was made for: TCP, TLS, or one local name of one host.
Whoever stands between the two ends can pass a proof on, but not from one kind to another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket

from sparkdl.transport.sockets import Encrypted

MAGIC = b"sparkdl2"
CHALLENGE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HELLO_BYTES = len(MAGIC) + CHALLENGE_BYTES
ANSWER_BYTES = PROOF_BYTES + CHALLENGE_BYTES
REFUSAL = bytes(PROOF_BYTES)
"""Says that the proof is wrong; a connection that ends without it is worth another attempt."""
WORKER, AVERAGER = b"worker", b"averager"
TLS = b"tls"
"""The channel of every encrypted connection, whose certificate has already been verified."""


class Challenge:
    """The averager's part, for one connection.

    Args:
        token: the job's secret.
        channel: as returned by ``channel_of``.

    Attributes:
        hello: what to send first; ``ANSWER_BYTES`` come back.
    """

    def __init__(self, token: str, channel: bytes) -> None:
        self._token = token
        self._channel = channel
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.hello = MAGIC + self._challenge

    def reply(self, answer: bytes) -> bytes | None:
        """The averager's own proof; None if the answer does not prove the worker's."""
        proof, theirs = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
        if not hmac.compare_digest(
            proof, prove(self._token, WORKER, self._channel, self._challenge)
        ):
            return None
        return prove(self._token, AVERAGER, self._channel, theirs)


def prove(token: str, role: bytes, channel: bytes, challenge: bytes) -> bytes:
    """The proof of one end. No role is a prefix of another, and all challenges are equally long."""
    return hmac.digest(token.encode(), role + channel + challenge, "sha256")


def channel_of(connected: socket.socket | Encrypted) -> bytes:
    """What both ends of a connection, and its listener, know of its channel and no other has."""
    if isinstance(connected, Encrypted):
        return TLS
    if connected.family != socket.AF_UNIX:
        return b"tcp"
    return b"local" + os.fsencode(connected.getsockname() or connected.getpeername() or b"")
