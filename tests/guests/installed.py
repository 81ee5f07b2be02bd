"""Which guests are here."""

from __future__ import annotations

import importlib.util

import pytest


def require(package: str) -> None:
    """Skip the test where a package is not installed; it is imported on the executors alone."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make test-guests does it")
