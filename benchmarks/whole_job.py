"""Wall time of ``fit()`` on a small job, first and second in a session, against what others offer.

The job: MLP 784-256-128-10, 8,000 rows, batch 64, 5 epochs, 2 workers, period 5. The peers do the
same job: TorchDistributor with DDP, a hand-written broadcast / mapPartitions / treeReduce loop with
the same period, and with ``--peer elephas`` also elephas 7.3, which needs an environment of its own
(made on first use, 3.7 GB). With ``--all-reduce`` ours reduces gradients in every step instead, as
DDP does, against TorchDistributor alone. Every measurement is a process with a fresh session on
local-cluster[2,1,2048]; our sessions are made by ``sparkdl.create_session``, with and without
``sparkdl-prepare`` run before, and by the user. With ``--source`` ours is compared with another
checkout instead, also on five files and with ``GradientAllReduce``.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkouts
import digits
import harness
import prepared

AVERAGING = ("sparkdl", "sparkdl_unprepared", "sparkdl_plain_session")
ALL_REDUCE = ("sparkdl_all_reduce",)
FITS = ("first fit", "second fit")
TARGETS = {
    "torch_distributor": {"first fit": 0.5, "second fit": 0.15},
    "averaging_loop": {"second fit": 0.2},
    "elephas": {"second fit": 0.4},
}
Runs = dict[str, list[list[dict[str, float]]]]


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--peer",
        action="append",
        choices=TARGETS,
        help="a peer; the first two if left out",
    )
    options.add_argument(
        "--elephas-environment",
        type=Path,
        default=Path.home() / ".cache" / "sparkdl-benchmarks" / "elephas",
        help="folder of the environment for elephas (default: %(default)s)",
    )
    options.add_argument(
        "--all-reduce", action="store_true", help="GradientAllReduce against TorchDistributor"
    )
    options.add_argument("--source", type=Path, help="a checkout to compare with, and nothing else")
    chosen = harness.parse(options, repeats=3)
    if chosen.source:
        checkouts.compare(
            "whole_job", chosen.source, "seconds", repeats=chosen.repeats, epochs=digits.EPOCHS
        )
        return
    ours = ALL_REDUCE if chosen.all_reduce else AVERAGING
    peers = chosen.peer or ["torch_distributor", *([] if chosen.all_reduce else ["averaging_loop"])]
    commands: dict[str, list[str | Path]] = {
        name: [sys.executable, harness.FOLDER / "fit_session.py", name] for name in (*ours, *peers)
    }
    if "elephas" in peers:
        python = elephas_python(chosen.elephas_environment)
        commands["elephas"] = [python, harness.FOLDER / "peers" / "elephas_job.py"]
    with tempfile.TemporaryDirectory() as folder:
        digits.write(Path(folder))
        prepared.prepare(Path(folder) / "cache")
        turns: dict[str, Callable[[], list[dict[str, float]]]] = {
            name: partial(fits, name, command, Path(folder)) for name, command in commands.items()
        }
        runs = harness.interleave(turns, repeats=chosen.repeats)
    report(runs, ours, peers)


def fits(name: str, command: list[str | Path], folder: Path) -> list[dict[str, float]]:
    """Runs one contender in a fresh session; returns the seconds and accuracy of each fit."""
    environment = prepared.environment_of(name, folder / "cache", Path(command[0]))
    child: dict[str, Any] = harness.run_child([*command, folder], environment=environment)
    print(f"  {name}: {child['fits']}", flush=True)
    return list(child["fits"])


def report(runs: Runs, contenders: tuple[str, ...], peers: list[str]) -> None:
    """Prints medians and claims, and the JSON line."""
    medians: dict[str, dict[str, float]] = {}
    accuracies: dict[str, float] = {}
    for name, repeats in runs.items():
        scores = [fit["accuracy"] for run in repeats for fit in run]
        accuracies[name] = round(statistics.mean(scores), 4)
        medians[name] = {
            fit: harness.show(
                f"{name}, {fit} (mean test accuracy {accuracies[name]:.3f})",
                [run[index]["seconds"] for run in repeats],
                digits=2,
            )
            for index, fit in enumerate(FITS)
        }
    claims = [
        harness.Claim(
            name=f"{ours} / {peer}, {fit}",
            ratio=medians[ours][fit] / medians[peer][fit],
            target=target,
        )
        for ours in contenders
        for peer in peers
        for fit, target in TARGETS[peer].items()
    ]
    measured = {
        "median_seconds": medians,
        "mean_test_accuracy": accuracies,
        "fits": runs,
    }
    harness.report("whole_job", claims, measured)


def elephas_python(folder: Path) -> Path:
    """Returns the Python of elephas' environment, which is installed if it is not there."""
    script = harness.FOLDER / "peers" / "environment.sh"
    made = subprocess.run(
        [script, "elephas", folder],
        env=harness.child_environment() | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())


if __name__ == "__main__":
    main()
