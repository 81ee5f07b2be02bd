"""Programs in a Python of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def run_python(
    *arguments: str | Path, timeout: float = 300.0, python: str = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """How a Python with these arguments ends, and what it prints; ``options`` are of ``run``."""
    command = [python, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def printed_by(*arguments: str | Path, timeout: float = 300.0, **options: Any) -> str:
    """What a Python prints that ends well."""
    done = run_python(*arguments, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
