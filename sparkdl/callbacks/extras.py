"""Libraries that only some callbacks need, imported when these are used."""

from __future__ import annotations

import importlib
from typing import Any

from sparkdl.errors import SetupError


def imported(module: str, *, package: str, extra: str, who: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its full name.
        package: the package that has it, as it is imported.
        extra: the extra of sparkdl-torch that installs it.
        who: what needs it, for the message.

    Raises:
        SetupError: the package is not installed in the driver's Python.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise SetupError(
            f"{who} needs {package}, which the driver's Python does not have. Install it there, "
            f'not on the executors: pip install "sparkdl-torch[{extra}]"'
        ) from error
