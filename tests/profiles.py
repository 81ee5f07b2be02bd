"""Profiles of trainings that cost exactly what they are told to."""

from __future__ import annotations

from typing import Any

from sparkdl.planner.profile import Profile
from sparkdl.planner.traffic import PLACES, Traffic

STEP_S, FIXED_S, BYTES, PERIOD, BATCH, STEPS = 0.02, 0.004, 1e6, 5, 32, 1000
A_BYTE = 1.5e-9
"""Seconds: 3 ms for a worker's million of bytes and the million that it is sent back."""


def traffic(**changes: Any) -> Traffic:
    driver = {"through": "driver", "up": BYTES, "down": BYTES, "period": PERIOD, "places": PLACES}
    return Traffic(**{**driver, **changes})


def profile(workers: int, *, exchange_s: float | None = None, **changes: Any) -> Profile:
    """A fit whose exchanges take ``FIXED_S`` and ``A_BYTE`` for each byte that passes."""
    sent: Traffic = changes.pop("traffic", traffic())
    seconds = FIXED_S + A_BYTE * sent.passing(workers) if exchange_s is None else exchange_s
    known: dict[str, Any] = {
        "model": "Net",
        "strategy": "ParameterAveraging(period=5)",
        "machine": "workers on a; driver: b",
        "workers": workers,
        "hosts": workers,
        "batch_size": BATCH,
        "aggregation": "driver",
        "traffic": sent,
        "rows": STEPS * BATCH,
        "trained": 250_000,
        "model_bytes": 1_000_000,
        "worker_step_s": (STEP_S,) * workers,
        "round_s": seconds,
        "rounds": 100,
        "epoch_seconds": (1.0, 1.0, 1.0),
    }
    return Profile(**{**known, **changes})
