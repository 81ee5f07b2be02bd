"""What the first task of a stage answers: a header, then bytes.

They travel as rows of the stage's own output, and nowhere else: the text of an error may quote what
a stranger has written. The header is JSON whose every field is checked, so nothing in it runs code.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparkdl import errors
from sparkdl.checkpoint.policy import OtherTrainingError
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.spark.diagnostics.console import Display
from sparkdl.user_code.tracebacks import add_note, message_of, traceback_of

PIECE_BYTES = 1 << 20
"""The most bytes in a row."""
MOST_LINES = 10_000
"""The most lines that come back of what workers print; their executors' logs have all."""
MAX_HEADER_BYTES = 256 << 20
"""The largest header: lines, history and recorded times take a few MB."""
_LENGTH = struct.Struct("<q")
_ERRORS = {
    each.__name__: each
    for each in (*vars(errors).values(), OtherTrainingError)
    if isinstance(each, type) and issubclass(each, SparkDLError)
}


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
    """Show in the client what a ``Told`` has kept.

    Raises:
        TrainingError: the header does not hold it.
    """
    with understood():
        lines = [(int(rank), _texts(shown), int(left)) for rank, shown, left in header["lines"]]
        logged = [(_texts([name, text]), int(level)) for name, level, text in header["logged"]]
    display = Display("the executor's log")
    for rank, shown, left_out in lines:
        display(rank, shown, left_out)
    for (name, text), level in logged:
        logging.getLogger(name).log(level, "%s", text)


def pieces(header: dict[str, Any], values: Iterable[memoryview] = ()) -> Iterator[bytes]:
    """A header with its length before it, then the values, cut small."""
    octets = json.dumps(header).encode()
    yield _LENGTH.pack(len(octets))
    for view in (memoryview(octets), *values):
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def header_of(pieces: Iterator[bytes]) -> dict[str, Any] | None:
    """Read a header; None if nothing came.

    Raises:
        TrainingError: it is not one.
    """
    first, octets = next(pieces, None), bytearray()
    if first is None:
        return None
    with understood():
        (length,) = _LENGTH.unpack(first)
        if not 0 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
    while len(octets) < length and (piece := next(pieces, None)):
        octets += piece
    with understood():
        if len(octets) != length:
            raise ValueError(f"its header has {len(octets)} of {length} bytes")
        header = json.loads(octets)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {header!r:.100}")
    return header


@contextmanager
def understood() -> Iterator[None]:
    """Read fields of a header, and say of one that is not as the first task sends it whose it is.

    Raises:
        TrainingError: there is such a field.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise TrainingError(
            "the first task, which serves the workers, sent an answer that cannot be read: "
            f"{message_of(error)}. Do the executors have this version of sparkdl-torch?"
        ) from error


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r:.100} is no list of texts")
    return value


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
    """The error that was described.

    Raises:
        TrainingError: nothing describes one.
    """
    with understood():
        kind, fields = _ERRORS[told["kind"]], told["fields"]
        message, *notes = _texts([told["message"], *told["notes"]])
        error = kind.__new__(kind, message)
        for name, value in fields.items():
            setattr(error, name, _FIELDS[name](value))
    for note in notes:
        add_note(error, note)
    return error


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "rank": int,
    "epoch": int,
    "step": int,
    "worker_traceback": str,
    "ranks": _ranks,
    "holder": str,
}
"""How the fields of errors are read."""
