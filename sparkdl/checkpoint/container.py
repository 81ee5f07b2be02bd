"""The safetensors format as a stream, without torch.

The safetensors library wants a whole file as one block of bytes, or a path on a local disk; a
center would take up its size in memory a second time. The format itself is plain: the length of the
header (8 bytes, little-endian), the header (JSON), and the tensors one after another.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from sparkdl.errors import CheckpointError

MAX_HEADER_BYTES = 100 << 20
"""The safetensors library's own limit."""
BLOCK_BYTES = 4 << 20
"""How much is written or read at once."""
WIDTHS = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1},
    **{"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8},
    **{"F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1},
    # Our own: the library has no name for them, and reads no such file.
    **{"C128": 16, "F4_E2M1_X2": 1},
}
"""Bytes of a number, by the name of its type."""


class DamagedError(CheckpointError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Piece:
    """A tensor that need not be in memory at once.

    Attributes:
        dtype: the name of its type.
        shape: its sizes.
        blocks: yields its bytes, at most so many at a time.
    """

    dtype: str
    shape: list[int]
    blocks: Callable[[int], Iterator[Any]]

    @property
    def size(self) -> int:
        """How many bytes."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def write_pieces(file: BinaryIO, pieces: Mapping[str, Piece], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Args:
        file: where to write; only written to, from its present position.
        pieces: the tensors by name.
        metadata: strings by name, kept in the header.

    Raises:
        CheckpointError: the header is larger than any reader takes, or a tensor has other bytes
            than its shape says.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, piece in pieces.items():
        start, end = end, end + piece.size
        header[name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its header would have {len(text)} bytes, over the limit of {MAX_HEADER_BYTES}: it "
            "holds the values of all metrics in every epoch. Let metrics return fewer numbers"
        )
    file.write(struct.pack("<Q", len(text)) + text)
    for name, piece in pieces.items():
        left = piece.size
        for block in piece.blocks(BLOCK_BYTES):
            file.write(block)
            left -= len(block)
        if left:
            raise CheckpointError(f"tensor '{name}' has {piece.size - left} of {piece.size} bytes")


def read_header(
    file: BinaryIO, blocks_at: Callable[[int, int], Callable[[int], Iterator[bytes]]]
) -> tuple[dict[str, Piece], dict[str, str]]:
    """Read what a safetensors file, which begins here, says of itself.

    Args:
        file: the file, of which the header is read.
        blocks_at: what yields the bytes at a place in the file, of which there are so many.

    Returns:
        The tensors by name, one after another without a gap, and the metadata.

    Raises:
        DamagedError: it is no such file, or damaged.
    """
    (size,) = struct.unpack("<Q", b"".join(blocks_of(file, 8)))
    if size > MAX_HEADER_BYTES:
        raise DamagedError(f"a header cannot have {size} bytes")
    text = b"".join(blocks_of(file, size))
    pieces: dict[str, Piece] = {}
    offset = 0
    try:
        header: dict[str, Any] = json.loads(text)
        metadata: dict[str, str] = header.pop("__metadata__", {})
        if not all(type(value) is str for value in metadata.values()):
            raise ValueError(reprlib.repr(metadata))
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, end), shape = entry["data_offsets"], entry["shape"]
            sizes = start, end, *shape
            # No tensor of torch's is larger or has more dimensions, and products take time.
            if len(sizes) > 66 or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
                raise ValueError(reprlib.repr({name: entry}))
            piece = Piece(entry["dtype"], shape, blocks_at(8 + size + start, end - start))
            if start != offset or end - start != piece.size:
                raise DamagedError(f"tensor '{name:.200}' has a size that does not match its shape")
            pieces[name], offset = piece, end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the header is damaged: {error!r:.400}") from error
    return pieces, metadata


def blocks_of(file: BinaryIO, left: int, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Read so many of a file's next bytes, at most so many at a time.

    Raises:
        DamagedError: the file ends early.
    """
    while left > 0:
        if not (block := file.read(min(size, left))):
            raise DamagedError(f"it ends {left} bytes early")
        left -= len(block)
        yield block
