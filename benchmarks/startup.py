"""Seconds from calling ``fit()`` to the first optimizer step, against pyspark's TorchDistributor.

Every measurement is a process of its own with a fresh session on local-cluster[2,1,2048]; it fits
twice. Both train the same MLP from the same Parquet files on two workers. Ours is timed until the
later of its workers has taken a step, in a session made by ``sparkdl.create_session`` with and
without ``sparkdl-prepare`` run before, and in one that the user built. With ``--connect`` both are
clients of a Spark Connect server that their process has started. With ``--source`` ours is compared
with another checkout instead, also on five files and with ``GradientAllReduce``.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import checkouts
import digits
import harness
import prepared

TARGETS = {"first fit": 0.5, "second fit": 0.15}
CONTENDERS = ("sparkdl", "sparkdl_unprepared", "sparkdl_plain_session", "torch_distributor")
CLIENTS = ("sparkdl_connect", "torch_distributor_connect")


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--source", type=Path, help="a checkout to compare with, and nothing else")
    options.add_argument("--connect", action="store_true", help="Spark Connect, and nothing else")
    chosen = harness.parse(options, repeats=5)
    if chosen.source:
        checkouts.compare("startup", chosen.source, "first_step", repeats=chosen.repeats, epochs=1)
        return
    with tempfile.TemporaryDirectory() as folder:
        digits.write(Path(folder))
        prepared.prepare(Path(folder) / "cache")
        contenders = CLIENTS if chosen.connect else CONTENDERS
        measured = measure(contenders, Path(folder), chosen.repeats)
    medians = {
        name: {
            fit: harness.show(f"{name}, {fit}, to the first step", [run[index] for run in runs])
            for index, fit in enumerate(TARGETS)
        }
        for name, runs in measured.items()
    }
    *ours, peer = contenders
    claims = [
        harness.Claim(
            name=f"{name} / {peer}, {fit}",
            ratio=medians[name][fit] / medians[peer][fit],
            target=target,
        )
        for name in ours
        for fit, target in TARGETS.items()
    ]
    harness.report("startup", claims, {"median_seconds": medians, "seconds": measured})


def measure(contenders: Sequence[str], folder: Path, repeats: int) -> dict[str, list[list[float]]]:
    """Returns, for each contender and repeat, the seconds to the first step of both fits."""
    turns: dict[str, Callable[[], list[float]]] = {
        name: partial(first_steps, name, folder) for name in contenders
    }
    return harness.interleave(turns, repeats=repeats)


def first_steps(name: str, folder: Path) -> list[float]:
    """Fits twice, one epoch each, in a fresh session; returns the seconds to each first step."""
    script = harness.FOLDER / "fit_session.py"
    child: dict[str, Any] = harness.run_child(
        [sys.executable, script, name, folder, "--epochs=1"],
        environment=prepared.environment_of(name, folder / "cache"),
    )
    print(f"  {name}: {child['fits']}", flush=True)
    return [fit["first_step"] for fit in child["fits"]]


if __name__ == "__main__":
    main()
