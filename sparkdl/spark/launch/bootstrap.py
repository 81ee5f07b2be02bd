"""The first code that runs in a worker's task; it must explain a Python that lacks everything else.

This module is pickled by value, so it runs on an executor that has no sparkdl, or another project's
(Databricks runtimes used to ship a module of that name). At the top level it may import nothing
that an executor could lack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

MARKER = "sparkdl cannot run on this executor: "
"""Opens the messages that the driver turns into a SetupError."""


def make_task(
    entry: str, arguments: tuple[Any, ...], versions: dict[str, str]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Build the function for mapInArrow.

    Args:
        entry: ``module:function`` to call on the executor with ``*arguments`` and the batches.
        arguments: plain values, because the executor may be unable to unpickle others.
        versions: as for ``require``.
    """

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import gc
        import importlib

        # Imports free next to nothing, yet the collector would take a tenth of their time.
        gc.disable()
        try:
            require(versions)
            module_name, function_name = entry.split(":")
            function = getattr(importlib.import_module(module_name), function_name)
        finally:
            gc.enable()
        yield from function(*arguments, batches)

    return task


def opened(data: bytes, versions: dict[str, str]) -> Any:
    """Unpickle a function of a task, once the versions have been compared.

    Args:
        data: the pickled function.
        versions: as for ``require``.
    """
    import pickle

    require(versions)
    return pickle.loads(data)


def require(versions: dict[str, str]) -> None:
    """Check that this Python has the driver's packages.

    Args:
        versions: the driver's versions of the packages that must match, by import name. Of torch
            the first two numbers must match, of others all.

    Raises:
        RuntimeError: a package is missing or has another version.
    """
    import importlib
    import socket

    def refuse(what: str) -> RuntimeError:
        return RuntimeError(
            MARKER + f"{what} (Python {sys.executable} on {socket.gethostname()}). Install the "
            "driver's versions there, or point PYSPARK_PYTHON at an environment that has them"
        )

    for name, wanted in versions.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise refuse(f"the package '{name}' cannot be imported: {error}") from error
        found = str(getattr(module, "__version__", "without a version"))
        if name == "torch" and found.split(".")[:2] == wanted.split(".")[:2]:
            continue
        if found != wanted:
            raise refuse(f"'{name}' is {found} here but {wanted} on the driver")
