"""The fixture ``play``: recordings by a clock that goes on when told to."""

from __future__ import annotations

import pytest
from recordings import Play, playing


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return playing(monkeypatch)
