"""Projects of a user's own in a folder that only the driver knows, made after the executors."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features):
        return self.layer(features)
"""


def write(folder: Path, files: dict[str, str], when: int = 0) -> None:
    """Write files, as of a second of their own: Python tells a changed file by it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1_000_000_000 + when,) * 2)


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Have Python find what is in a folder; forget after what was imported from there."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        new = set(sys.modules) - before
        for name in [name for name in new if is_of(sys.modules[name], folder)]:
            del sys.modules[name]


def is_of(module: types.ModuleType, folder: Path) -> bool:
    """Whether a module, or a package without a file, was found in a folder."""
    places: list[Any] = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
    return any(str(place).startswith(str(folder)) for place in places)
