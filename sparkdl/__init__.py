"""Train PyTorch models on Spark DataFrames, with replicas that stay in the executors.

``__init__.pyi`` lists the public names, one per line. Each is imported on first use: a worker needs
only a small part of this package, and every import there delays the first step of a fit.
"""

from __future__ import annotations

import ast
import importlib
import os
from typing import Any

_LIST = __spec__.loader.get_data(os.path.join(*__path__, "__init__.pyi"))
_HOMES = {
    each.name: line.module
    for line in ast.parse(_LIST).body
    if isinstance(line, ast.ImportFrom)
    for each in line.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkdl' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "pyspark":
            raise
        raise ModuleNotFoundError(
            f"sparkdl.{name} needs pyspark, which is not installed: on a cluster, start Python by "
            "its spark-submit or pyspark, which bring their own; elsewhere, pip install "
            "'sparkdl-torch[spark]'",
            name="pyspark",
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
