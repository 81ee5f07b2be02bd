"""Where a row is, and how messages say so: in words that can be found again and translated."""

from __future__ import annotations

import re
from collections.abc import Callable

RowLocation = tuple[int, int]
"""Where a row is: (partition, position in it), both counted from 0."""
_IN_WORDS = re.compile(r"\brow (\d+) of partition (\d+)\b")


def names_places(message: str) -> bool:
    """Whether a message about rows says where they are."""
    return _IN_WORDS.search(message) is not None


def with_places(message: str, translate: Callable[[RowLocation], RowLocation]) -> str:
    """A message about rows, with each of the places in it translated."""
    return _IN_WORDS.sub(lambda found: in_words(translate((int(found[2]), int(found[1])))), message)


def in_words(place: RowLocation) -> str:
    """Where a row is, as messages say it."""
    partition, row = place
    return f"row {row} of partition {partition}"
