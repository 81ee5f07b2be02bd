"""Bytes that a worker sends for the driver to keep: its state, or what its metrics counted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from sparkdl.errors import TrainingError

IN_MEMORY_BYTES = 1 << 20
"""Anything larger goes to a file, because the driver's memory must not grow with the workers: the
state of an 8-bit optimizer does, random numbers and counters do not."""


class WorkerState:
    """Some bytes from a worker; used by one thread at a time.

    Attributes:
        size: how many bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        # Open as long as this object lives; the file has no name, so nothing is left behind.
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115

    def add(self, block: bytes | memoryview) -> None:
        """Keep more bytes.

        Raises:
            TrainingError: they fit neither into the driver's memory nor on its disk.
        """
        try:
            self._file.write(block)
        except OSError as error:
            raise TrainingError(
                f"the driver could not store the state for restarting a worker ({self.size} bytes "
                f"or more) in {tempfile.gettempdir()}: {error}. Set TMPDIR to a folder with more "
                "space"
            ) from error
        self.size += len(block)

    def blocks(self, size: int) -> Iterator[bytes]:
        """The bytes, from first to last.

        Args:
            size: how many at a time.
        """
        self._file.seek(0)
        while block := self._file.read(size):
            yield block
