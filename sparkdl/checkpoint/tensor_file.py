"""Tensors in a safetensors file that is written and read as a stream.

The safetensors library wants a whole file as one block of bytes, or a path on a local disk; a
center would take up its size in memory a second time. The format itself is plain: the length of the
header (8 bytes, little-endian), the header (JSON), and the tensors one after another.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparkdl.errors import CheckpointError

MAX_HEADER_BYTES = 100 << 20
"""The safetensors library's own limit."""
BLOCK_BYTES = 4 << 20
"""How much is written or read at once."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",  # our own: the library has no name for it, and reads no such file
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file.

    Args:
        file: where to write; only written to, from its present position.
        tensors: the tensors by name, of any shape, on any device.
        metadata: strings by name, kept in the header.

    Raises:
        CheckpointError: a tensor has a dtype that the format does not know.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"tensor '{name}' is {tensor.dtype}, which cannot be saved")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        octets = _octets(tensor.detach().contiguous().cpu())
        for start in range(0, len(octets), BLOCK_BYTES):
            file.write(octets[start : start + BLOCK_BYTES])


def read_tensors(file: BinaryIO) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        file: the file, read from its present position to its end.

    Returns:
        The tensors by name, on the CPU in their own memory, and the metadata.

    Raises:
        CheckpointError: the file is damaged.
    """
    header = _read_header(file)
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        if start != offset or end - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"tensor '{name}' has a size that does not match its shape")
        tensor = _empty(name, shape, dtype)
        _read_into(file, _octets(tensor))
        tensors[name], offset = tensor, end
    if file.read(1):
        raise CheckpointError("bytes follow the last tensor")
    return tensors, metadata


def _read_header(file: BinaryIO) -> dict[str, Any]:
    length = bytearray(8)
    _read_into(file, memoryview(length))
    size = struct.unpack("<Q", length)[0]
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"a header cannot have {size} bytes")
    text = bytearray(size)
    _read_into(file, memoryview(text))
    try:
        header: dict[str, Any] = json.loads(text)
        for name, entry in header.items():
            if name == "__metadata__":
                if not all(type(value) is str for value in entry.values()):
                    raise ValueError(reprlib.repr({name: entry}))
                continue
            start, end = entry["data_offsets"]
            sizes = [start, end, *entry["shape"]]
            if entry["dtype"] not in _DTYPES or not all(type(n) is int and n >= 0 for n in sizes):
                raise ValueError(reprlib.repr({name: entry}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the header is damaged: {error!r}") from error
    return header


def _empty(name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as error:  # too many dimensions, or too large
        raise CheckpointError(f"tensor '{name}' has an impossible shape: {error}") from error


def _read_into(file: BinaryIO, target: memoryview) -> None:
    filled = 0
    while filled < len(target):
        block = file.read(min(BLOCK_BYTES, len(target) - filled))
        if not block:
            raise CheckpointError(f"the file ends {len(target) - filled} bytes early")
        target[filled : filled + len(block)] = block
        filled += len(block)


def _octets(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, as a view."""
    return tensor.view(-1).view(torch.uint8).numpy().data
