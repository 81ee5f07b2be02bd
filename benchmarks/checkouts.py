"""Compares small fits of this checkout and another in one run, for startup.py and whole_job.py."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import digits
import harness

CASES = ("sparkdl_plain_session", "sparkdl_five_files", "sparkdl_all_reduce_five_files")
"""Of fit_session.py: one file per worker, and more files than workers, also with a gang start."""
FITS = ("first fit", "second fit")
SLOWER_BY_S = 0.3
"""Seconds by which a second fit of a session may be slower than the other checkout's."""


def compare(benchmark: str, source: Path, figure: str, *, repeats: int, epochs: int) -> None:
    """Measures both in turns, two fits in each fresh session, and reports.

    Args:
        benchmark: its name, for the report.
        source: the other checkout.
        figure: what is compared, as fit_session.py names it: ``first_step`` or ``seconds``.
        repeats: sessions of each kind.
        epochs: epochs of each fit.
    """
    checkouts = {"ours": harness.FOLDER.parent, str(source): source}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns = {
            f"{case} of {checkout}": partial(fits, case, path, folder, figure, epochs)
            for case in CASES
            for checkout, path in checkouts.items()
        }
        measured = harness.interleave(turns, repeats=repeats)
    medians = {
        who: [
            harness.show(f"{who}, {fit}, {figure}", [run[index] for run in runs], digits=2)
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
    harness.report(benchmark, claims, {"median_seconds": medians, "seconds": measured})


def fits(case: str, source: Path, folder: Path, figure: str, epochs: int) -> list[float]:
    """Fits twice in a fresh session, with the code of a checkout; returns a figure of each."""
    command = [
        sys.executable,
        harness.FOLDER / "fit_session.py",
        case,
        folder,
        f"--epochs={epochs}",
    ]
    environment = harness.child_environment(source=source)
    child: dict[str, Any] = harness.run_child(command, environment=environment)
    print(f"  {case} of {source}: {child['fits']}", flush=True)
    return [fit[figure] for fit in child["fits"]]
