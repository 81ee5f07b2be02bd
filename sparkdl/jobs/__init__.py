"""Training, evaluation and prediction as jobs: one grammar, exit codes, all-or-nothing outputs.

``jobs/train.py``, ``evaluate.py`` and ``predict.py`` call ``train``, ``evaluate`` and ``predict``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.jobs.sources import Files, Query, Source, Table

__all__ = ["Files", "Query", "Source", "Table"]


def __getattr__(name: str) -> Any:
    """Import a source when it is used, so that ``__main__`` can tell which package is missing."""
    if name not in __all__:
        raise AttributeError(f"module 'sparkdl.jobs' has no attribute '{name}'")
    return getattr(importlib.import_module("sparkdl.jobs.sources"), name)


def __dir__() -> list[str]:
    return __all__
