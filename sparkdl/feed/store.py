"""The partition store: a worker's rows on its own host, one memory-mapped file a column.

Rows are appended as tensors while epoch 1 streams and mapped afterwards, so data larger than memory
works and a random minibatch is one gather from the page cache. A column is one contiguous tensor in
its final dtype; Arrow record batches would leave it in pieces, and a gather over pieces walks them
in Python.

The files have no name: they are unlinked when created, so a crash leaves nothing behind.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from sparkdl.protocols import ColumnSpec


class PartitionStore:
    """Append rows once, then read them in any order.

    Args:
        directory: where to put the files; must have room for the rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._specs: tuple[ColumnSpec, ...] = ()
        self._files: list[IO[bytes]] = []
        self._tensors: list[Tensor] | None = None
        self.rows = 0

    def append(self, specs: Sequence[ColumnSpec], batch: Sequence[Tensor]) -> None:
        """Add rows.

        Args:
            specs: what the columns are, the same at every call.
            batch: one tensor a column, shape (n, *row_shape), in the column's dtype.
        """
        if not self._files:
            self._specs = tuple(specs)
            self._files = [
                tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - closed in close()
                for _ in specs
            ]
        for file, values in zip(self._files, batch, strict=True):
            remaining = values.contiguous().view(-1).view(torch.uint8).numpy().data
            while remaining:
                remaining = remaining[file.write(remaining) :]
        self.rows += len(batch[0])

    def tensors(self) -> list[Tensor]:
        """Map the columns; no row may be appended after.

        Returns:
            One tensor a column, shape (rows, *row_shape), backed by the file; none without rows.
        """
        if self._tensors is None:
            self._tensors = [
                self._map(file, spec) for file, spec in zip(self._files, self._specs, strict=True)
            ]
        return list(self._tensors)

    def close(self) -> None:
        """Give the disk space back."""
        self._tensors = None
        for file in self._files:
            file.close()

    def _map(self, file: IO[bytes], spec: ColumnSpec) -> Tensor:
        shape = (self.rows, *spec.row_shape)
        if self.rows == 0 or 0 in shape:
            return torch.empty(shape, dtype=spec.dtype)
        # A private mapping is writable for torch's sake; nobody writes.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=spec.dtype).view(shape)
