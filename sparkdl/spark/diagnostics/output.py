"""Sends what a worker prints to the driver; printing never waits for the network."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from sparkdl.errors import StoppedError

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
Log = Callable[[str], None]


class Output:
    """Lines printed by a worker, sent by a thread of its own; a context manager.

    Args:
        send: sends them; a ``StoppedError`` ends the sending, not the training.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # Those left out were after so many of the others.
        self._lines, self._left_out, self._gap = list[tuple[str, Log | None]](), 0, 0
        self._lock = threading.RLock()  # finalizers and signal handlers may print while it is held
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="sparkdl-output", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LAST_LINES_S)

    def add(self, line: str, log: Log | None = None) -> None:
        """Take a line; returns at once.

        Args:
            line: the line.
            log: called with a line that is not sent, or not all of it; None if it is logged anyway.
        """
        unsent = [(line, log)] if len(line) > MAX_LINE else []
        if unsent:
            line, log = line[:MAX_LINE] + " ...", None
        with self._lock:
            self._lines.append((line, log))
            if not self._left_out:
                self._gap = MAX_LINES_A_SECOND
            if len(self._lines) > self._gap + MAX_LINES_A_SECOND:
                unsent.insert(0, self._lines.pop(self._gap))
                self._left_out += 1
        for line, log in unsent:
            if log is not None:
                log(line)

    @contextlib.contextmanager
    def capture(self, *, echo: bool = True) -> Iterator[None]:
        """Capture what Python code writes to standard output and standard error.

        Args:
            echo: whether it is still written there too.
        """
        before = sys.stdout, sys.stderr
        captured = [_Captured(stream, self.add, echo) for stream in before]
        kept = [each.stream() for each in captured]
        sys.stdout, sys.stderr = kept
        try:
            yield
        finally:
            # A script may have wrapped the bytes of ours, closed them, or detached them.
            for stream in (sys.stdout, sys.stderr, *kept):
                with contextlib.suppress(AttributeError, ValueError):
                    stream.flush()
            for each in captured:
                each.finish()
            sys.stdout, sys.stderr = before

    def _forward(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(INTERVAL_S)
            told = self._take(int(MAX_LINES_A_SECOND * INTERVAL_S))
            while any(told):
                try:
                    self._send(*told)
                except StoppedError:
                    return  # the driver is gone, so nobody would read this
                told = self._take(MAX_LINES_A_SECOND) if ended else ([], 0)

    def _take(self, most: int) -> tuple[list[str], int]:
        """The next lines, and how many were left out after them."""
        with self._lock:
            most = min(most, self._gap) if self._left_out else most
            taken, self._lines[:most] = self._lines[:most], []
            self._gap, left_out = self._gap - most, 0
            if not self._gap:
                left_out, self._left_out = self._left_out, 0
        return [line for line, _ in taken], left_out


class _Captured(io.BufferedIOBase):
    """The bytes below a stream that passes on each complete line, and may write to another too.

    There are bytes below its text because scripts use everything that standard output offers.
    """

    def __init__(self, original: TextIO, add: Callable[..., None], echo: bool) -> None:
        original.flush()  # what follows bypasses it and goes to the bytes below
        self._original, self._echo, self._started = original, echo, ""
        self._add = add if echo else partial(add, log=self._log)
        self._encoding = getattr(original, "encoding", None) or "utf-8"
        self._decoder = codecs.getincrementaldecoder(self._encoding)("replace")
        self._lock = threading.RLock()

    def stream(self) -> io.TextIOWrapper:
        """The stream above these bytes."""
        return io.TextIOWrapper(
            self,  # type: ignore[arg-type]
            encoding=self._encoding,
            errors="backslashreplace",  # an unencodable character is no reason to end a training
            newline="",
            line_buffering=getattr(self._original, "line_buffering", False),
            write_through=True,
        )

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def isatty(self) -> bool:
        return self._original.isatty()

    def flush(self) -> None:
        self._original.flush()

    def write(self, octets: Any) -> int:
        copied = bytes(octets)
        with self._lock:
            text = self._decoder.decode(copied)
            if self._echo:
                # A notebook's has no bytes below.
                below = getattr(self._original, "buffer", None)
                self._original.write(text) if below is None else below.write(copied)
            *lines, rest = (self._started + text).split("\n")
            # A progress bar overwrites its line without ever ending it.
            self._started = rest.rpartition("\r")[2][: 2 * MAX_LINE]
            for line in lines:
                self._add(line.rpartition("\r")[2])
        return len(copied)

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        if last := self._started + self._decoder.decode(b"", final=True):
            self._add(last)

    def _log(self, line: str) -> None:
        """Write a line that is not sent where the whole stream would have gone."""
        with contextlib.suppress(OSError, ValueError):  # closed; it must not end what it reports on
            self._original.write(line + "\n")
            self._original.flush()
