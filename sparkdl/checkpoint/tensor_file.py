"""Tensors in a safetensors file that is written and read as a stream; see ``container``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import BinaryIO

import torch
from torch import Tensor

from sparkdl.checkpoint import container
from sparkdl.checkpoint.container import DamagedError, Piece, blocks_of, read_header, write_pieces
from sparkdl.errors import CheckpointError

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E8M0": torch.float8_e8m0fnu, "F4_E2M1_X2": torch.float4_e2m1fn_x2},
    **{"BOOL": torch.bool, "C64": torch.complex64, "C128": torch.complex128},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Tensors of any shape, on any device, for ``write_pieces``.

    Raises:
        CheckpointError: a tensor has a dtype that the format does not know.
    """
    return {name: _piece(name, tensor) for name, tensor in tensors.items()}


def _piece(name: str, tensor: Tensor) -> Piece:
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"tensor '{name}' is {tensor.dtype}, which cannot be saved")

    def blocks(size: int) -> Iterator[memoryview]:
        octets = octets_of(tensor)
        for start in range(0, len(octets), size):
            yield octets[start : start + size]

    return Piece(_NAMES[tensor.dtype], list(tensor.shape), blocks)


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, and strings by name, as a safetensors file.

    Raises:
        CheckpointError: a tensor has a dtype that the format does not know.
    """
    write_pieces(file, pieces_of(tensors), metadata or {})


def read_tensors(file: BinaryIO) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        file: the file, read from its present position to its end.

    Returns:
        The tensors by name, on the CPU in their own memory, and the metadata.

    Raises:
        CheckpointError: the file is damaged.
    """
    pieces, metadata = read_header(file, lambda start, size: partial(blocks_of, file, size))
    tensors = {name: tensor_of(piece) for name, piece in pieces.items()}
    if file.read(1):
        raise DamagedError("bytes follow the last tensor")
    return tensors, metadata


def tensor_of(piece: Piece) -> Tensor:
    """Read a tensor into memory of its own.

    Raises:
        CheckpointError: the file ends early, or the shape is impossible.
    """
    try:
        tensor = torch.empty(piece.shape, dtype=DTYPES[piece.dtype])
    except (KeyError, RuntimeError, TypeError) as error:  # too many dimensions, or too large
        raise DamagedError(
            f"no tensor here has type {piece.dtype} and shape {piece.shape!r:.200}: {error}"
        ) from error
    octets, filled = octets_of(tensor), 0
    for block in piece.blocks(container.BLOCK_BYTES):
        octets[filled : filled + len(block)] = block
        filled += len(block)
    return tensor


def octets_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, in place if it is contiguous and on the CPU."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    # A single number is contiguous whatever its stride.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data
