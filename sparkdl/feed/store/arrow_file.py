"""An Arrow IPC file around values that already lie in it.

    magic, schema, beginning of the one record batch | values | footer
    -------------------- start ----------------------

The values are written while nobody knows yet how many there will be. Arrow's own writer then adds
what goes around them: it is given the values, but what it writes of them is passed over. There is
one record batch, however large, so that the column lies in one piece.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

_ALIGNMENT = 4096
"""Of the values in the file. With Arrow's own 8, rows of 64 bytes would lie across cache lines."""
_NUMBERS = {
    torch.float64: pa.float64(),
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.uint16(),  # which Arrow does not have
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.int16: pa.int16(),
    torch.int8: pa.int8(),
    torch.uint8: pa.uint8(),
    torch.bool: pa.uint8(),  # of which Arrow makes bits
}


class ArrowFrame:
    """What goes around the values of one column.

    Args:
        name: the column's.
        dtype: of its numbers.
        row_shape: of one row; () for a number. No size in it is 0.

    Attributes:
        start: where in the file the values begin, in bytes.
    """

    def __init__(self, name: str, dtype: torch.dtype, row_shape: Sequence[int]) -> None:
        self._numbers = _NUMBERS[dtype]
        self._elements = math.prod(row_shape)
        self._type: pa.DataType = self._numbers
        if row_shape:
            self._type = pa.fixed_shape_tensor(self._numbers, list(row_shape))
        about = {"dtype": str(dtype).removeprefix("torch.")}
        self._schema = pa.schema([pa.field(name, self._type, nullable=False, metadata=about)])
        self._schema = self._schema.with_metadata({"padding": ""})
        padding = " " * (-self._measured() % _ALIGNMENT)
        self._schema = self._schema.with_metadata({"padding": padding})
        self.start = self._measured()

    def put_around(self, file: int, rows: int) -> None:
        """Complete a file that has the values, from ``start`` on.

        Args:
            file: its descriptor.
            rows: how many there are; at least one.

        Raises:
            OSError: there is no room for it.
        """
        mapped = pa.py_buffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        self._write(_Surroundings(file), mapped.slice(self.start), rows)

    def _measured(self) -> int:
        """Bytes before the values; they are the same for any number of rows."""
        sink = _Surroundings(None)
        row_bytes = self._elements * self._numbers.bit_width // 8
        self._write(sink, pa.py_buffer(bytes(row_bytes)), 1)
        return sink.start

    def _write(self, sink: _Surroundings, values: pa.Buffer, rows: int) -> None:
        column = pa.Array.from_buffers(self._numbers, rows * self._elements, [None, values])
        if isinstance(self._type, pa.BaseExtensionType):
            lists = pa.FixedSizeListArray.from_arrays(column, self._elements)
            column = pa.ExtensionArray.from_storage(self._type, lists)
        with pa.ipc.new_file(sink, self._schema) as writer:
            writer.write_batch(pa.record_batch([column], schema=self._schema))


class _Surroundings(io.RawIOBase):
    """Takes what Arrow writes except the values: among bytes, they are the one buffer.

    Args:
        file: descriptor of where to write it; None to measure only.

    Attributes:
        start: where the values begin.
    """

    start: int

    def __init__(self, file: int | None) -> None:
        self._file = file
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if isinstance(data, pa.Buffer):
            self.start = self._position
        elif self._file is not None:
            _put(self._file, data, self._position)
        self._position += size
        return size


def _put(file: int, data: bytes, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


def stored_values(mapped: mmap.mmap) -> np.ndarray:
    """The values of a file that was completed, as they lie there: shape (bytes,), uint8."""
    column = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0).column(0)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage.values
    return np.frombuffer(column.buffers()[1], np.uint8)
