"""How messages look on the wire: a prefix with kind and length, then a header or values.

A header is a JSON object, values are the bytes of a tensor. The receiver knows how many values
there have to be, so no length from the wire decides how much memory is allocated. Nothing is ever
unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdl.errors import TrainingError

MAX_HEADER_BYTES = 16 << 20
"""Longest header; the statistics of 50,000 columns fit."""
HEADER_KIND, VALUES_KIND = 1, 2
_PREFIX = struct.Struct("!BI")
PREFIX_BYTES = _PREFIX.size


def octets_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return values.detach().view(torch.uint8).numpy().data


def values_prefix(size: int) -> memoryview:
    """The prefix of ``size`` bytes of values."""
    return memoryview(_PREFIX.pack(VALUES_KIND, size))


def header_message(fields: Mapping[str, Any]) -> bytes:
    """A whole message that holds a JSON object."""
    octets = json.dumps(fields).encode()
    return _PREFIX.pack(HEADER_KIND, len(octets)) + octets


def read_prefix(octets: bytes | bytearray) -> tuple[int, int]:
    """Kind and length of the message that follows a prefix.

    Raises:
        TrainingError: no message of ours begins like this.
    """
    kind, length = _PREFIX.unpack(octets)
    if kind not in (HEADER_KIND, VALUES_KIND):
        raise TrainingError(f"a message of unknown kind {kind} arrived")
    if kind == HEADER_KIND and length > MAX_HEADER_BYTES:
        raise TrainingError(f"a header of {length} bytes arrived, more than {MAX_HEADER_BYTES}")
    return kind, length


def read_header(octets: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a message.

    Raises:
        TrainingError: it is not a JSON object.
    """
    try:
        fields = json.loads(octets)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise TrainingError("a message without a readable header arrived where one was expected")
    return fields
