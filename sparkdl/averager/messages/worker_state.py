"""Bytes that a worker sends for the driver to keep: its state, or its metrics' counts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from sparkdl.errors import TrainingError

IN_MEMORY_BYTES = 1 << 20
"""Anything larger goes to a file, as the driver's memory must not grow with the number of workers:
random numbers and counters stay below, the state of an 8-bit optimizer does not."""


class WorkerState:
    """Some bytes of a worker; used by one thread at a time.

    Attributes:
        size: how many.
    """

    def __init__(self) -> None:
        self.size = 0
        # Open as long as this object lives; the file has no name, so nothing is left behind.
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115

    def add(self, block: bytes | memoryview) -> None:
        """Add a block.

        Raises:
            TrainingError: it is too much for the driver's memory and its disk.
        """
        try:
            self._file.write(block)
        except OSError as error:
            raise TrainingError(
                f"the driver could not keep what it has to know of a worker, to start it again "
                f"({self.size} bytes and more), in {tempfile.gettempdir()}: {error}. Set "
                "TMPDIR to a folder with more room"
            ) from error
        self.size += len(block)

    def blocks(self, size: int) -> Iterator[bytes]:
        """The bytes from first to last.

        Args:
            size: how many at a time.
        """
        self._file.seek(0)
        while block := self._file.read(size):
            yield block
