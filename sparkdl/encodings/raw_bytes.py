"""A tensor's own bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.encodings.encoding import DecodedRows, Encoding, Shape
from sparkdl.encodings.lists import binary_bytes, broken_where, lists_of, numpy_of

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor


class RawBytes(Encoding):
    """The raw memory of a row, in the tensor's dtype, row-major."""

    name = "bytes"
    numeric = False
    of_bytes = True
    needs_dtype = True

    def takes(self, kind: pa.DataType) -> bool:
        """Binary rows."""
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """The bytes of a row as a list of bytes."""
        size = self.list_length(math.prod(shape), dtype)
        lengths = numpy_of(pc.binary_length(values))
        wrong = lengths != size
        if wrong.any():
            found = int(lengths[wrong][0])
            reason = f"has {found} bytes, but {dtype} of shape {shape} takes {size}"
            broken = broken_where(wrong, reason.replace("torch.", ""))
            return self.decode(values.filter(pa.array(~wrong)), shape, dtype)[0], broken
        return lists_of(binary_bytes(values), len(values)), None

    def list_length(self, elements: int, dtype: torch.dtype) -> int:
        """The number of bytes that the elements take."""
        return elements * dtype.itemsize

    def tensor(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """View the same memory as the tensor's dtype."""
        return numbers.view(dtype)


BYTES = RawBytes()
