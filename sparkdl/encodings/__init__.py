"""How the rows of a column arrive, and how they become numbers."""

from __future__ import annotations

from sparkdl.encodings.encoding import UNKNOWN, Encoding
from sparkdl.encodings.images import IMAGE
from sparkdl.encodings.known import arriving_as, named, register
from sparkdl.encodings.linalg import VECTOR
from sparkdl.encodings.numbers import BYTES, NUMBERS
from sparkdl.encodings.pixels import PIXELS

__all__ = [
    "BYTES",
    "IMAGE",
    "NUMBERS",
    "PIXELS",
    "UNKNOWN",
    "VECTOR",
    "Encoding",
    "arriving_as",
    "named",
    "register",
]
