"""Compares small fits of this checkout and another in one run, for whole_job.py."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import digits
import harness

CASES = ("sparkdl", "sparkdl_five_files", "sparkdl_all_reduce_five_files")
"""Of fit_session.py: one file per worker, and more files than workers, also with a gang start."""
FITS = ("first fit", "second fit")
SLOWER_BY_S = 0.3
"""Seconds by which a second fit of a session may be slower than the other checkout's."""


def compare(source: Path, *, repeats: int) -> None:
    """Measures both in turns, two fits in each fresh session, and reports.

    Args:
        source: the other checkout.
        repeats: sessions of each kind.
    """
    checkouts = {"ours": harness.FOLDER.parent, str(source): source}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns = {
            f"{case} of {checkout}": partial(fits, case, path, folder)
            for case in CASES
            for checkout, path in checkouts.items()
        }
        measured = harness.interleave(turns, repeats=repeats)
    medians = {
        who: [
            harness.show(f"{who}, {fit}", [run[index] for run in runs], digits=2)
            for index, fit in enumerate(FITS)
        ]
        for who, runs in measured.items()
    }
    claims = [
        harness.Claim(
            name=f"{case}, {FITS[1]}, less that of {source}, / {SLOWER_BY_S} s",
            ratio=(medians[f"{case} of ours"][1] - medians[f"{case} of {source}"][1]) / SLOWER_BY_S,
            target=1.0,
        )
        for case in CASES
    ]
    harness.report("whole_job", claims, {"median_seconds": medians, "seconds": measured})


def fits(case: str, source: Path, folder: Path) -> list[float]:
    """Fits twice in a fresh session, with the code of a checkout; returns the seconds of each."""
    child: dict[str, Any] = harness.run_child(
        [sys.executable, harness.FOLDER / "fit_session.py", case, folder],
        environment=harness.child_environment(source=source),
    )
    print(f"  {case} of {source}: {child['fits']}", flush=True)
    return [fit["seconds"] for fit in child["fits"]]
