"""Seconds from ``fit()`` to 95 % test accuracy on the digits, first and later fits of a session.

Ours, with ParameterAveraging and with GradientAllReduce, against TorchDistributor with DDP, elephas
7.3 (in an environment of its own, made on first use, 3.7 GB) and two hand-written loops: one as
most people write it, on the DataFrame's rows with a Spark job per epoch, and the best case of it,
whose workers keep everything between rounds and read files bypassing Spark. For honesty, also one
process of plain torch in the driver, which first collects the rows.

All train the MLP of digits.py on its 8,000 rows in minibatches of 64 with SGD with momentum, with
two workers on local-cluster[2,1,2048]. Every contender saves its parameters after each epoch, on
its own time; the snapshots are evaluated when the fit is over, so that nobody's clock includes the
test rows. What counts is the time of the first snapshot that reaches the accuracy: the time to
return the model and to end is not counted (which favours contenders that end slowly).

A turn is a fresh session of each contender, with a first fit and some later ones, each with other
initial values and another order of rows; all contenders get the same seeds. Learning rate, period
and the like are the best for each: ``--search`` tries all of ``GRIDS`` in later fits of one
session, in turns, and prints the ``SETTINGS`` to put down here.
"""

import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import digits
import harness
import prepared
import whole_job
from accuracy_curves import crossing

WANTED = 0.95
TARGET = 0.35
EPOCHS = 10
"""Epochs of every fit; most reach the accuracy after five to eight."""
LATER_FITS = 2
OURS = ("sparkdl", "sparkdl_plain_session", "sparkdl_all_reduce")
SPARK_PEERS = ("torch_distributor", "elephas", "averaging_loop", "averaging_frame")
ALONE = "one_process"
CONTENDERS = (*OURS, *SPARK_PEERS, ALONE)
SESSION_TIMEOUT_SECONDS = 3_600.0

RATES, RATES_OF_MEAN_GRADIENTS = [0.03, 0.06, 0.1], [0.06, 0.1, 0.15]
"""With 0.2, minibatches of 64 no longer train; a mean gradient is over 128 rows."""
GRIDS: dict[str, dict[str, list[Any]]] = {
    # An epoch has 63 minibatches.
    "sparkdl": {"learning_rate": RATES, "period": [5, 21, 63], "stream": [False, True]},
    "sparkdl_all_reduce": {"learning_rate": RATES_OF_MEAN_GRADIENTS, "stream": [False]},
    "torch_distributor": {"learning_rate": RATES_OF_MEAN_GRADIENTS},
    "elephas": {"learning_rate": RATES},
    "averaging_loop": {"learning_rate": RATES, "period": [21, 63]},
    "averaging_frame": {"learning_rate": RATES},
    "one_process": {"learning_rate": RATES, "threads": [1, 2]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sparkdl": {"learning_rate": 0.1, "period": 63, "stream": True},
    "sparkdl_all_reduce": {"learning_rate": 0.1, "stream": False},
    "torch_distributor": {"learning_rate": 0.1},
    "elephas": {"learning_rate": 0.1},
    "averaging_loop": {"learning_rate": 0.03, "period": 63},
    "averaging_frame": {"learning_rate": 0.06},
    "one_process": {"learning_rate": 0.1, "threads": 1},
}
SETTINGS["sparkdl_plain_session"] = SETTINGS["sparkdl"]

Fits = list[dict[str, Any]]
"""``seconds`` and ``curve`` of the fits of one session; see accuracy_curves.py."""
Session = Callable[[Sequence[dict[str, Any]]], Fits]


def main() -> None:
    """Measures and reports, or searches."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--contender", action="append", choices=CONTENDERS, help="one of them; all if left out"
    )
    options.add_argument("--search", action="store_true", help="find each one's best settings")
    options.add_argument("--plot", type=Path, help="where to draw the curves, an SVG or PNG file")
    options.add_argument(
        "--elephas-environment",
        type=Path,
        default=Path.home() / ".cache" / "sparkdl-benchmarks" / "elephas",
        help="folder of the environment for elephas (default: %(default)s)",
    )
    chosen = harness.parse(options, repeats=3)
    contenders = chosen.contender or [*CONTENDERS]
    if not chosen.search and not all(set(contenders) & {*side} for side in (OURS, SPARK_PEERS)):
        options.error("--contender: one of ours and one Spark peer are needed to compare")
    with tempfile.TemporaryDirectory() as folder:
        digits.write(Path(folder))
        prepared.prepare(Path(folder) / "cache")
        sessions = {
            name: session_of(name, Path(folder), chosen.elephas_environment) for name in contenders
        }
        if chosen.search:
            search(sessions, chosen.repeats)
            return
        turns = {name: turn(name, session) for name, session in sessions.items()}
        runs = harness.interleave(turns, repeats=chosen.repeats)
    if chosen.plot is not None:
        import accuracy_plot

        accuracy_plot.draw(runs, WANTED, chosen.plot)
    report(runs)


def session_of(name: str, folder: Path, elephas_environment: Path) -> Session:
    """Returns a function that runs the fits of a plan in a fresh session of a contender."""
    if name == "elephas":
        python = whole_job.elephas_python(elephas_environment)
        command = [python, harness.FOLDER / "peers" / "elephas_curves.py"]
    else:
        command = [Path(sys.executable), harness.FOLDER / "accuracy_session.py", name]

    def session(plan: Sequence[dict[str, Any]]) -> Fits:
        child = harness.run_child(
            [*command, folder, json.dumps(plan)],
            environment=prepared.environment_of(name, folder / "cache", Path(command[0])),
            timeout=SESSION_TIMEOUT_SECONDS,
        )
        return list(child["fits"])

    return session


def turn(name: str, session: Session) -> Callable[[], Fits]:
    """Returns a function that runs a contender's next session: a first fit and the later ones."""
    seeds = itertools.count()

    def fits() -> Fits:
        common = {**SETTINGS[name], "epochs": EPOCHS}
        done = session([{**common, "seed": next(seeds)} for _ in range(1 + LATER_FITS)])
        there = ", ".join(f"{seconds_to(fit):.2f}" for fit in done)
        print(f"  {name}: {WANTED:.0%} after {there} s", flush=True)
        return done

    return fits


def seconds_to(fit: dict[str, Any]) -> float:
    """Returns the seconds that a fit took to reach the accuracy; infinity if it never did."""
    seconds = crossing(fit["curve"], WANTED)
    return math.inf if seconds is None else seconds


def search(sessions: dict[str, Session], repeats: int) -> None:
    """Prints how every point of the contenders' grids does in later fits, and each one's best."""
    for name, session in sessions.items():
        if name not in GRIDS:
            continue
        grid = [
            dict(zip(GRIDS[name], values, strict=True))
            for values in itertools.product(*GRIDS[name].values())
        ]
        shuffled = random.Random(7)
        fits = [
            (point, seed) for seed in range(repeats) for point in shuffled.sample(grid, len(grid))
        ]
        plan = [{**point, "epochs": EPOCHS, "seed": seed} for point, seed in [(grid[0], 0), *fits]]
        done = [seconds_to(fit) for fit in session(plan)[1:]]  # the first fit is not a later one
        found = []
        for point in grid:
            taken = [
                seconds for (tried, _), seconds in zip(fits, done, strict=True) if tried == point
            ]
            found.append((statistics.median(taken), statistics.mean(taken), point))
            harness.show(f"  {name} {point}", taken, digits=2)
        print(f'"{name}": {min(found, key=lambda each: each[:2])[2]},', flush=True)


def report(runs: dict[str, list[Fits]]) -> None:
    """Prints medians and claims, and the JSON line."""
    medians: dict[str, dict[str, float]] = {}
    for which, part in {"later fits": slice(1, None), "first fit": slice(1)}.items():
        medians[which] = {
            name: harness.show(
                f"{name}, {which}",
                [seconds_to(fit) for fits in sessions for fit in fits[part]],
                digits=2,
            )
            for name, sessions in runs.items()
        }
    for which, seconds in medians.items():
        if ALONE in seconds:
            ours = min(seconds[name] for name in OURS if name in seconds)
            print(f"best of ours / {ALONE}, {which}: {ours / seconds[ALONE]:.2f}")
    claims = [claim for which in medians for claim in claims_of(which, medians[which])]
    measured = {
        "accuracy": WANTED,
        "median_seconds": {
            which: {name: each if math.isfinite(each) else None for name, each in seconds.items()}
            for which, seconds in medians.items()
        },
        "settings": {name: SETTINGS[name] for name in runs},
        "fits": runs,
    }
    harness.report("time_to_accuracy", claims, measured)


def claims_of(which: str, seconds: dict[str, float]) -> list[harness.Claim]:
    """Returns ours / the best Spark peer, and the other ratios for those who want to choose."""
    ours, best = (
        min((name for name in names if name in seconds), key=seconds.__getitem__)
        for names in (OURS, SPARK_PEERS)
    )
    others = {f"{best}, the best Spark peer": best, **{name: name for name in SPARK_PEERS}}
    return [
        harness.Claim(
            name=f"{ours} / {text}, {which}", ratio=seconds[ours] / seconds[name], target=TARGET
        )
        for text, name in others.items()
        if name in seconds and text != best
    ]


if __name__ == "__main__":
    main()
