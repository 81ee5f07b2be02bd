"""Where a worker may write its rows on its own host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sparkdl.errors import ConfigError

STORE_PLACES = ("disk", "memory")
"""The values that ``storeIn`` may have."""
MEMORY = Path("/dev/shm")
"""The in-memory file system of Linux."""


def row_directory(in_memory: str | None) -> Path:
    """Where a worker keeps its rows.

    Args:
        in_memory: what demands that they stay in memory, for the message; None if they may be on
            a disk.

    Raises:
        ConfigError: there is no such place on this host.
    """
    if in_memory is None:
        # Spark's own on this host, which Spark empties when the executor ends.
        given = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        return Path(next(filter(os.path.isdir, given), tempfile.gettempdir()))
    if not os.path.ismount(MEMORY) or not os.access(MEMORY, os.W_OK):
        raise ConfigError(
            f"{in_memory}, so rows must be kept in memory, but {MEMORY} is not a file system "
            "that this process can write to. Mount one there, or allow rows on disk"
        )
    return MEMORY
