"""What the first task of a stage answers: a header, then bytes.

Nothing in them runs code at the client: the header's pickle may only name classes of a few plain
kinds.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch

from sparkdl import errors
from sparkdl.checkpoint.policy import OtherTrainingError
from sparkdl.encodings import Encoding
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.report.recording import Recording, TimeBins
from sparkdl.spark.diagnostics.console import Display
from sparkdl.user_code.tracebacks import add_note, traceback_of

PIECE_BYTES = 1 << 20
"""The most bytes in a row."""
MOST_LINES = 10_000
"""The most lines that come back of what workers print; their executors' logs have all."""
_LENGTH = struct.Struct("<q")
_ENDED = "what serves the workers has ended, and says to the driver: "
_SAID = re.compile(rf"{_ENDED}([A-Za-z0-9+/=]+)")
_PLAIN = {
    "builtins": {"frozenset", "set"},
    "collections": {"OrderedDict", "deque"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
}
"""What a header may name besides our own classes and torch's dtypes."""
_ERRORS = {
    each.__name__: each
    for each in (*vars(errors).values(), OtherTrainingError)
    if isinstance(each, type) and issubclass(each, SparkDLError)
}
_FIELDS = ("rank", "epoch", "step", "worker_traceback", "ranks", "holder")


class Told(logging.Handler):
    """What workers print and what is logged while a run is served, for the client to show."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[tuple[int, list[str], int]] = []
        self._logged: list[tuple[str, int, str]] = []
        self._left = MOST_LINES

    @property
    def header(self) -> dict[str, Any]:
        """All of it, for ``show_told``."""
        return {"lines": self._lines, "logged": self._logged}

    def show(self, rank: int, lines: Sequence[str], left_out: int) -> None:
        """Keep a rank's lines; see ``console.Show``."""
        kept = list(lines[: self._left])
        self._left -= len(kept)
        left_out += len(lines) - len(kept)
        if self._lines and self._lines[-1][0] == rank and not kept:
            left_out += self._lines.pop()[2] if not self._lines[-1][1] else 0
        self._lines.append((rank, kept, left_out))

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each record."""
        if len(self._logged) < MOST_LINES:
            self._logged.append((record.name, record.levelno, record.getMessage()))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep what this package logs meanwhile."""
        ours = logging.getLogger("sparkdl")
        ours.addHandler(self)
        try:
            yield
        finally:
            ours.removeHandler(self)


def show_told(header: dict[str, Any]) -> None:
    """Show in the client what a ``Told`` has kept."""
    display = Display("the executor's log")
    for rank, lines, left_out in header["lines"]:
        display(rank, lines, left_out)
    for name, level, message in header["logged"]:
        logging.getLogger(name).log(level, "%s", message)


def pieces(header: dict[str, Any], values: Iterable[memoryview] = ()) -> Iterator[bytes]:
    """A header with its length before it, then the values, cut small."""
    octets = pickle.dumps(header, protocol=5)
    yield _LENGTH.pack(len(octets))
    for view in (memoryview(octets), *values):
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def error_with(header: dict[str, Any]) -> RuntimeError:
    """A header as an error of the task, for ``told_at_end``."""
    octets = pickle.dumps(header, protocol=5)
    packed = zlib.compress(_LENGTH.pack(len(octets)) + octets)
    return RuntimeError(f"{_ENDED}{base64.b64encode(packed).decode()}")


def told_at_end(text: str) -> bytes | None:
    """What a task has answered with its error, as one piece; None if it has not.

    Args:
        text: Spark's message for the failed job.
    """
    if (said := _SAID.search(text)) is None:
        return None
    try:
        return zlib.decompress(base64.b64decode(said[1]))
    except (ValueError, zlib.error):  # a user's error may quote anything
        return None


def header_of(pieces: Iterator[bytes]) -> dict[str, Any] | None:
    """Read a header; None if nothing came.

    Raises:
        TrainingError: it names what is not plain.
    """
    first = next(pieces, None)
    if first is None:
        return None
    (length,) = _LENGTH.unpack_from(first)
    octets = bytearray(first[_LENGTH.size :])
    while len(octets) < length:
        octets += next(pieces)
    header: dict[str, Any] = Plain(io.BytesIO(octets)).load()
    return header


class Plain(pickle.Unpickler):
    """Takes values that are plain, from a server that need not be trusted with more."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every class or function that a pickle names."""
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("sparkdl."):
            found = super().find_class(module, name)
            plain = is_dataclass(found) or found in (Recording, TimeBins)
            if isinstance(found, type) and (plain or issubclass(found, (Encoding, Enum))):
                return found
        raise TrainingError(f"what came back from the executors names {module}.{name}")


def described(error: Exception) -> dict[str, Any]:
    """An error in plain values, for ``restored``."""
    if not isinstance(error, SparkDLError):  # the client has to know, whatever it is
        error = TrainingError(
            f"what serves the workers failed beside rank 0: {traceback_of(error)}"
        )
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
    fields = {name: getattr(error, name) for name in _FIELDS if hasattr(error, name)}
    notes = getattr(error, "__notes__", [])
    return {"kind": kind, "message": str(error), "notes": notes, "fields": fields}


def restored(told: dict[str, Any]) -> SparkDLError:
    """The error that was described."""
    kind = _ERRORS[told["kind"]]
    error = kind.__new__(kind, told["message"])
    for name, value in told["fields"].items():
        setattr(error, name, value)
    for note in told["notes"]:
        add_note(error, note)
    return error
