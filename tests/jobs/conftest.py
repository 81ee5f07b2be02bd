"""Makes the job and its package importable, as they are when jobs/train.py is run."""

from __future__ import annotations

import sys
from pathlib import Path

JOBS = Path(__file__).parents[2] / "jobs"
if str(JOBS) not in sys.path:
    sys.path.insert(0, str(JOBS))
