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
"""The most that one worker sends: of a burst the first and the last lines, so many of each. What is
left out is in the worker's own log, which is the driver's standard error with a local master."""
MAX_LINE = 2_000
"""The most characters of a line that are sent."""
INTERVAL_S = 0.1
"""Seconds between two checks for printed lines."""

LAST_LINES_S = 10.0
"""Seconds to send the last lines; a driver that takes none must not hold the worker up."""

Send = Callable[[list[str], int], None]
"""Sends some lines, and the number of lines left out after them; may block."""
_Line = tuple[str, Callable[[str], None] | None]


class Output:
    """Lines printed by a worker, sent by a thread of its own; a context manager.

    Args:
        send: sends them; an ``OSError`` ends the sending, not the training.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # What is next, and what a burst ended with: the lines left out were between the two.
        self._first: collections.deque[_Line] = collections.deque()
        self._last: collections.deque[_Line] = collections.deque()
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

    def add(self, line: str, log: Callable[[str], None] | None = None) -> None:
        """Take a line; returns at once.

        Args:
            line: the line.
            log: called with a line that is not sent, or not all of it; None if it is logged anyway.
        """
        left_out = None
        with self._lock:
            if not self._last and len(self._first) < MAX_LINES_A_SECOND:
                self._first.append((line, log))
            else:
                self._last.append((line, log))
                if len(self._last) > MAX_LINES_A_SECOND:
                    left_out = self._last.popleft()
                    self._left_out += 1
        if left_out is not None and left_out[1] is not None:
            left_out[1](left_out[0])

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
            while any(told := self._take(MAX_LINES_A_SECOND if ended else int(may_send))):
                may_send -= len(told[0])
                try:
                    self._send(*told)
                except OSError:
                    return  # the driver is gone, so nobody would read this
            if ended:
                return

    def _take(self, most: int) -> tuple[list[str], int]:
        """The next lines, and how many were left out after them."""
        with self._lock:
            taken = [self._first.popleft() for _ in range(min(most, len(self._first)))]
            left_out = 0
            if not self._first:
                left_out, self._left_out = self._left_out, 0
                self._first, self._last = self._last, collections.deque()
        return [_cut(*line) for line in taken], left_out


def _cut(line: str, log: Callable[[str], None] | None) -> str:
    if len(line) <= MAX_LINE:
        return line
    if log is not None:
        log(line)
    return line[:MAX_LINE] + " ..."


class _Copy(io.TextIOWrapper):
    """A stream that passes on each complete line, and may write to another stream too.

    It has bytes below its text, because scripts use everything that standard output offers.
    """

    def __init__(self, original: TextIO, take: Callable[..., None], echo: bool) -> None:
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
        self, original: TextIO, encoding: str, take: Callable[..., None], echo: bool
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
                self._pass_on(line.rpartition("\r")[2])
        return len(copied)

    def flush(self) -> None:
        self._original.flush()

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        if last := self._started + self._decoder.decode(b"", final=True):
            self._pass_on(last)
        self._started = ""

    def _pass_on(self, line: str) -> None:
        if self._echo:
            self._take(line)
        else:
            self._take(line, self._log)

    def _log(self, line: str) -> None:
        """Write a line that is not sent where the whole stream would have gone."""
        with contextlib.suppress(OSError, ValueError):  # closed; it must not end what it reports on
            self._original.write(line + "\n")
            self._original.flush()

    def _echo_there(self, octets: bytes, text: str) -> None:
        below = getattr(self._original, "buffer", None)
        if below is None:  # a notebook's
            self._original.write(text)
        else:
            below.write(octets)
