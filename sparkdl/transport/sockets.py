"""Connected sockets, plain or over TLS: for a thread that waits, or for a loop that never does.

Over TLS, both ends know the certificate already and need no authority. The listening end makes a
key and a certificate that live as long as the port. Their fingerprint travels the way the job's
token does, and the connecting end accepts that certificate and no other, before anything is sent.
It then proves itself by the token, inside TLS.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError

RECORD_BYTES = 1 << 14
"""The most that TLS puts into one record."""
_PIECE_BYTES = 16 * RECORD_BYTES
_DAY = datetime.timedelta(days=1)


def listen(
    host: str, ports: tuple[int, int] | None, widen: str, backlog: int | None = None
) -> socket.socket:
    """Listen on an address; the port stays bound, so nobody can take it before it is used.

    Args:
        host: an address or name of this machine.
        ports: first and last port to try; None for any free one.
        widen: the setting that gives them, for the message.
        backlog: connections that may wait to be accepted.

    Raises:
        ConfigError: every port of the range is taken.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((address[0], port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"every port from {first} to {last} is taken on {host} ({socket.gethostname()}). "
        f"Widen {widen}"
    )


class Certificate:
    """A fresh key with a self-signed certificate.

    Raises:
        ConfigError: the package that makes certificates is not installed.

    Attributes:
        fingerprint: the certificate's SHA-256, in hexadecimal digits.
    """

    def __init__(self) -> None:
        password = secrets.token_bytes(32)
        encoded, pem = _make(password)
        self.fingerprint = hashlib.sha256(encoded).hexdigest()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0  # nobody resumes a session
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            # Python's ssl reads keys from files only; this one is useless without the password.
            path = Path(folder, "certificate")
            path.write_bytes(pem)
            self._context.load_cert_chain(path, password=password)

    def wrap(self, connected: socket.socket) -> ssl.SSLSocket:
        """Encrypt an accepted connection; the handshake happens with the first bytes.

        Args:
            connected: the socket, owned from here on.

        Raises:
            OSError: the other end is gone.
        """
        return self._context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)


def connect(
    address: tuple[str, int], fingerprint: str | None, timeout_s: float
) -> socket.socket | Encrypted:
    """Connect to a port of ours.

    Args:
        address: the port's host and number.
        fingerprint: of the certificate that it has to show; None for a port without encryption.
        timeout_s: seconds to wait for each answer.

    Raises:
        OSError: nobody can be reached there, or somebody else answers.
    """
    connected = socket.create_connection(address, timeout=timeout_s)
    return connected if fingerprint is None else _verified(connected, fingerprint)


def _verified(connected: socket.socket, fingerprint: str) -> Encrypted:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint says more than any authority
    encrypted = Encrypted(context.wrap_socket(connected))
    found = hashlib.sha256(encrypted.certificate).hexdigest()
    if not hmac.compare_digest(found, fingerprint):
        encrypted.close()
        raise OSError(
            f"the certificate found there has SHA-256 {found}, but the job's has {fingerprint}: "
            "it is another job's port, or someone is intercepting the connection"
        )
    return encrypted


class Encrypted:
    """A socket over TLS, with those methods of a plain one that are used here.

    One thread may send while another receives: OpenSSL's state of a connection is behind a lock,
    which nobody holds while waiting.

    Args:
        encrypted: the socket, owned from here on.

    Attributes:
        family: the socket's address family.
        silence_s: the longest for which nothing may move, in seconds; None for no limit, 0 never to
            wait.
    """

    def __init__(self, encrypted: ssl.SSLSocket) -> None:
        encrypted.settimeout(0)
        self.family = encrypted.family
        self.silence_s: float | None = None
        self._encrypted = encrypted
        self._lock = threading.Lock()

    @property
    def certificate(self) -> bytes:
        """The other end's certificate, as DER."""
        return self._encrypted.getpeercert(binary_form=True) or b""

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Like a socket's."""
        self._encrypted.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Like a socket's."""
        return self._encrypted.fileno()

    def setblocking(self, flag: bool) -> None:
        """Like a socket's."""
        self.silence_s = None if flag else 0.0

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Receive what there is, up to one record; 0 at the end. The arguments are a socket's.

        No selector sees what is left of a record, so there should be room for a whole one.

        Raises:
            BlockingIOError: nothing came for ``silence_s``.
        """
        return self._when_ready(lambda: self._encrypted.recv_into(buffer))

    def sendall(self, octets: Any) -> None:
        """Send all of the bytes.

        Raises:
            BlockingIOError: the other end took nothing for ``silence_s``.
        """
        view = memoryview(octets)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            # OpenSSL sends it whole or not at all; if not, it has to be offered again.
            self._when_ready(lambda piece=piece: self._encrypted.send(piece))  # type: ignore[misc]

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send the beginning of some buffers; returns how many bytes.

        Raises:
            BlockingIOError: the other end took nothing for ``silence_s``; the same has to be
                offered again.
        """
        octets: bytes | memoryview = parts[0]
        # A prefix in a record of its own would cost as much as a full one.
        if len(octets) < RECORD_BYTES and len(parts) > 1:
            octets = b"".join([octets, parts[1][: RECORD_BYTES - len(octets)]])
        return self._when_ready(lambda: self._encrypted.send(octets[:_PIECE_BYTES]))

    def shutdown(self, how: int) -> None:
        """Like a socket's; what has arrived can still be decrypted, in any thread."""
        socket.socket.shutdown(self._encrypted, how)

    def close(self) -> None:
        """Like a socket's."""
        self._encrypted.close()

    def _when_ready(self, attempt: Callable[[], int]) -> int:
        while True:
            try:
                with self._lock:
                    return attempt()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            if self.silence_s == 0:
                raise BlockingIOError("no data can move on an encrypted connection")
            poll = select.poll()
            poll.register(self._encrypted, event)
            if not poll.poll(None if self.silence_s is None else 1000 * self.silence_s):
                raise BlockingIOError("no data moved on an encrypted connection")


def _make(password: bytes) -> tuple[bytes, bytes]:
    """A certificate as DER; and as PEM with its key, which is encrypted with the password."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            f"encrypted connections need the package 'cryptography' ({error}). Install it: "
            "pip install 'sparkdl-torch[tls]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sparkdl")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 3650 * _DAY)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(password)
    )
    public = certificate.public_bytes(form.Encoding.PEM)
    return certificate.public_bytes(form.Encoding.DER), secret + public
