"""Every test in this folder needs a GPU; none needs Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
