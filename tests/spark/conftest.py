"""A folder of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import on_path


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder in which only the driver looks for modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    with on_path(folder):
        yield folder
