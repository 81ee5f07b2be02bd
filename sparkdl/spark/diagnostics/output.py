"""Sends what a worker prints to the driver; printing never waits for the network."""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

MAX_LINES_A_SECOND = 200
"""The most that one worker sends; what it prints beyond that is only in the executor's log."""
MAX_LINE = 2_000
"""The most characters of a line that are sent."""
INTERVAL_S = 0.1
"""Seconds between two checks for printed lines."""

LAST_LINES_S = 10.0
"""Seconds to send the last lines; a driver that takes none must not hold the worker up."""

Send = Callable[[list[str], int], None]
"""Sends some lines, and the number of lines left out after them; may block."""


class Output:
    """Lines printed by a worker, sent by a thread of its own; a context manager.

    Args:
        send: sends them; an ``OSError`` ends the sending, not the training.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lines: collections.deque[str] = collections.deque()
        self._left_out = 0
        self._lock = threading.RLock()  # finalizers and signal handlers may print while it is held
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="sparkdl-output", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LAST_LINES_S)

    def add(self, line: str) -> None:
        """Take a line; returns at once."""
        with self._lock:
            if len(self._lines) < MAX_LINES_A_SECOND:
                self._lines.append(line if len(line) <= MAX_LINE else line[:MAX_LINE] + " ...")
            else:
                self._left_out += 1

    @contextlib.contextmanager
    def capture(self, *, echo: bool = True) -> Iterator[None]:
        """Capture what Python code writes to standard output and standard error.

        Args:
            echo: whether it is still written there too.
        """
        before = sys.stdout, sys.stderr
        copies = _Copy(sys.stdout, self.add, echo), _Copy(sys.stderr, self.add, echo)
        sys.stdout, sys.stderr = copies
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):  # a script may have wrapped the bytes of ours
                with contextlib.suppress(AttributeError, ValueError):
                    stream.flush()
            for copy in copies:
                copy.finish()
            sys.stdout, sys.stderr = before

    def _forward(self) -> None:
        may_send, last = float(MAX_LINES_A_SECOND), time.monotonic()
        while True:
            ended = self._ended.wait(INTERVAL_S)
            now = time.monotonic()
            may_send = min(MAX_LINES_A_SECOND, may_send + (now - last) * MAX_LINES_A_SECOND)
            last = now
            lines, left_out = self._take(MAX_LINES_A_SECOND if ended else int(may_send))
            may_send -= len(lines)
            if lines or left_out:
                try:
                    self._send(lines, left_out)
                except OSError:
                    return  # the driver is gone, so nobody would read this
            if ended:
                return

    def _take(self, most: int) -> tuple[list[str], int]:
        with self._lock:
            lines = [self._lines.popleft() for _ in range(min(most, len(self._lines)))]
            left_out = 0
            if not self._lines:
                left_out, self._left_out = self._left_out, 0
            return lines, left_out


class _Copy(io.TextIOWrapper):
    """A stream that passes on each complete line, and may write to another stream too.

    It has bytes below its text, because scripts use everything that standard output offers.
    """

    def __init__(self, original: TextIO, take: Callable[[str], None], echo: bool) -> None:
        encoding = getattr(original, "encoding", None) or "utf-8"
        self._copied = _CopiedBytes(original, encoding, take, echo)
        super().__init__(
            self._copied,  # type: ignore[arg-type]
            encoding=encoding,
            errors="backslashreplace",  # an unencodable character is no reason to end a training
            newline="",
            line_buffering=getattr(original, "line_buffering", False),
            write_through=True,
        )

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        with contextlib.suppress(ValueError):  # closed, or detached from its bytes
            self.flush()
        self._copied.finish()


class _CopiedBytes(io.BufferedIOBase):
    """The bytes below a ``_Copy``."""

    def __init__(
        self, original: TextIO, encoding: str, take: Callable[[str], None], echo: bool
    ) -> None:
        self._original = original
        self._echo = echo
        self._take = take
        self._started = ""
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._lock = threading.RLock()
        original.flush()  # what follows bypasses it and goes to the bytes below

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def isatty(self) -> bool:
        return self._original.isatty()

    def write(self, octets: Any) -> int:
        copied = bytes(octets)
        with self._lock:
            text = self._decoder.decode(copied)
            if self._echo:
                self._echo_there(copied, text)
            *lines, rest = (self._started + text).split("\n")
            # A progress bar overwrites its line without ever ending it.
            self._started = rest.rpartition("\r")[2][: 2 * MAX_LINE]
            for line in lines:
                self._take(line.rpartition("\r")[2])
        return len(copied)

    def flush(self) -> None:
        self._original.flush()

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        if last := self._started + self._decoder.decode(b"", final=True):
            self._take(last)
        self._started = ""

    def _echo_there(self, octets: bytes, text: str) -> None:
        below = getattr(self._original, "buffer", None)
        if below is None:  # a notebook's
            self._original.write(text)
        else:
            below.write(octets)
