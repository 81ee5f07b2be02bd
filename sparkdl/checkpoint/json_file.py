"""JSON files of a saved model: read whole or refused with a clear error, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError

LARGEST_BYTES = 64 << 20
"""Largest file; a thousand columns and ten thousand epochs take 3 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: it is missing, not a regular file, too large, or does not hold such an object.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is missing, or not a plain file")
        with path.open("rb") as file:
            octets = file.read(LARGEST_BYTES + 1)
        if len(octets) > LARGEST_BYTES:
            raise ConfigError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB: it is damaged")
        value = json.loads(octets)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is damaged: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object")
    return value
