"""Where a worker may write on its own host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def local_directory() -> Path:
    """Spark's scratch directory on this host, which Spark empties when the executor ends."""
    for directory in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if directory and os.path.isdir(directory):
            return Path(directory)
    return Path(tempfile.gettempdir())
