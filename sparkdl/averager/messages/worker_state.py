"""What the driver keeps: of workers to start them again, of the center to return it in the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkdl.errors import TrainingError

IN_MEMORY_BYTES = 1 << 20
"""What is more goes to a file: random numbers and counters do not, the state of an 8-bit optimizer
does, for the driver's memory must not grow with the workers."""


class WorkerState:
    """Some bytes of a worker; used by one thread at a time.

    Attributes:
        size: how many.
    """

    def __init__(self) -> None:
        self.size = 0
        # Open as long as this object lives; the file has no name, so that nothing is left behind.
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115

    def add(self, block: bytes | memoryview) -> None:
        """Keep more.

        Raises:
            TrainingError: it is too much for the driver's memory, and for its disk.
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
        """The bytes from the first to the last.

        Args:
            size: how many of them at a time.
        """
        self._file.seek(0)
        while block := self._file.read(size):
            yield block


@dataclass
class KeptModel:
    """A copy of the center of some time, without the optimizer's state; not written to.

    Attributes:
        epoch: after which it was the center.
        values: a tensor of ``center_dtype`` for each segment of the layout that is none of the
            optimizer's.
        saved: whether a checkpoint has it.
    """

    epoch: int
    values: Sequence[Tensor]
    saved: bool = False
