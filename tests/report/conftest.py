"""The fixture ``play``: recordings by a clock that goes on when told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recordings import Play, playing


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    yield from playing(monkeypatch)
