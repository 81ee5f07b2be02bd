"""What a process holds open, for tests on threads, processes and executors.

Other threads close files while the list is read: what is gone by then is left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cloudpickle

# Executors cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def open_files(pid: int | str = "self") -> list[str]:
    """What each open file of a process is: a path, ``socket:[...]`` and so on.

    Args:
        pid: the process; this one by default. Of one that is gone the list is empty.
    """
    found = []
    try:
        for number in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(os.readlink(number))
            except OSError:
                continue
    except OSError:
        return []
    return found


def unnamed_files(pid: int | str = "self") -> list[str]:
    """Those without a name, as the files of a partition store are."""
    return [file for file in open_files(pid) if file.endswith("(deleted)")]
