"""The known encodings, by their names and by the types of columns."""

from __future__ import annotations

import pyarrow as pa

from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.encoding import Encoding
from sparkdl.encodings.images import IMAGE
from sparkdl.encodings.linalg import VECTOR
from sparkdl.encodings.numbers import BYTES, NUMBERS
from sparkdl.encodings.pixels import PIXELS

_known: dict[str, Encoding] = {
    each.name: each for each in (NUMBERS, VECTOR, BYTES, IMAGE, PIXELS, *FITS.values())
}


def register(encoding: Encoding) -> None:
    """Make an encoding known to this process, in place of an earlier definition of its class.

    Raises:
        ValueError: another encoding already has its name.
    """
    earlier = _known.get(encoding.name, encoding)
    # Running a notebook cell again defines the class again.
    if _definition(earlier) != _definition(encoding):
        raise ValueError(f"there is already another encoding named '{encoding.name}'")
    _known[encoding.name] = encoding


def named(name: object) -> Encoding:
    """The encoding with a name that was received.

    Raises:
        ValueError: there is none, or the value is not a name.
    """
    if not isinstance(name, str) or name not in _known:
        raise ValueError(f"{name!r} is not an encoding: there are {', '.join(_known)}")
    return _known[name]


def arriving_as(kind: pa.DataType, likely: Encoding = NUMBERS) -> Encoding | None:
    """How rows of an Arrow type arrive; None if nobody can tell.

    Args:
        kind: the type.
        likely: the encoding to ask first, registered or not.
    """
    return next((each for each in (likely, *_known.values()) if each.takes(kind)), None)


def _definition(encoding: Encoding) -> tuple[str, str]:
    kind = type(encoding)
    return kind.__module__, kind.__qualname__
