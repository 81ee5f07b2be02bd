"""A project of the user's to run from: programs and the modules beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def _copied_to(directory: Path) -> Path:
    shutil.copytree(PROGRAMS, directory, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's working directory, with the programs in it."""
    directory = _copied_to(tmp_path / "project")
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def copy_of_project(tmp_path: Path) -> Path:
    """The same programs, elsewhere."""
    return _copied_to(tmp_path / "copy")
