"""Seconds from ``fit()`` to 95 % test accuracy on the digits, first and later fits of a session.

Ours, with ParameterAveraging and with GradientAllReduce, against TorchDistributor with DDP, elephas
7.3 on TensorFlow (in an environment of its own, made on first use, 3.7 GB) and two hand-written
loops: one as most people write it, on the DataFrame's rows with a Spark job per epoch, and the best
case of it, whose workers keep everything between rounds and read files bypassing Spark. Beside them
one process of plain torch in the driver, which first collects the rows.

All train the MLP of digits.py on its 8,000 rows in minibatches of 64 with SGD with momentum, with
two workers on local-cluster[2,1,2048]. Every contender saves its parameters after each epoch, on
its own time; the snapshots are evaluated when the fit is over, so that nobody's clock includes the
test rows. What counts is the time of the first snapshot that reaches the accuracy: the time to
return the model and to end is not counted (which favours contenders that end slowly).

A turn is a fresh session of each contender, built by the user, with a first fit and some later
ones, each with other initial values and another order of rows; all contenders get the same seeds.

``--search`` first finds each contender's best settings, by later fits, and then measures with
these; they are printed to be put down in ``SETTINGS``. It judges by validation rows,
which share no image with the test rows, and uses seeds that no turn uses. Each contender tries as
many settings as the others, picked at random (Bergstra and Bengio 2012), or all that it has.

``--plot`` draws the curves with matplotlib, which comes with ``sparkdl-torch[examples]``, on a
transparent background and in colours of medium brightness, so that the picture can be read on a
light page and on a dark one.
"""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accuracy_curves
import digits
import fit_session
import harness
import torch
from accuracy_curves import take_module
from peers import averaging_loop, ddp
from pyspark.sql import SparkSession

WANTED = 0.95
TARGET = 0.35
EPOCHS = 10
"""Epochs of every fit; most reach the accuracy after five to eight."""
LATER_FITS = 2
OURS = ("sparkdl", "sparkdl_all_reduce")
SPARK_PEERS = ("torch_distributor", "elephas", "averaging_loop", "averaging_frame")
ALONE = "one_process"
CONTENDERS = (*OURS, *SPARK_PEERS, ALONE)
SESSION_TIMEOUT_SECONDS = 3_600.0

RATES = [0.02, 0.03, 0.044, 0.067, 0.1, 0.15, 0.22]
TRIES = 12
"""Settings that each contender tries."""
SEARCH_SEEDS = 1_000
"""The first seed of the search."""
PERIODS = [1, 2, 5, 10, 21, digits.STEPS]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "sparkdl": {"period": PERIODS},
    "averaging_loop": {"period": PERIODS},
    ALONE: {"threads": [1, 2]},
}
"""Settings beside the learning rate."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sparkdl": {"learning_rate": 0.1, "period": 63},
    "sparkdl_all_reduce": {"learning_rate": 0.1},
    "torch_distributor": {"learning_rate": 0.067},
    "elephas": {"learning_rate": 0.1},
    "averaging_loop": {"learning_rate": 0.1, "period": 63},
    "averaging_frame": {"learning_rate": 0.1},
    "one_process": {"learning_rate": 0.044, "threads": 2},
}
"""Found on 29 November 2026 by trying neighbours of the best: 4 each, of 12 for one process."""

Fits = list[dict[str, Any]]
"""``seconds`` and ``curve`` of the fits of one session; see accuracy_curves.py."""
Session = Callable[[Sequence[dict[str, Any]]], Fits]


def main() -> None:
    """Searches if that is asked for, measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--contender", action="append", choices=CONTENDERS, help="one of them; all if left out"
    )
    options.add_argument("--search", action="store_true", help="find each one's best settings")
    options.add_argument("--plot", type=Path, help="where to draw the curves, an SVG or PNG file")
    chosen = harness.parse(options, repeats=3, child=fits_of_a_session)
    contenders = chosen.contender or [*CONTENDERS]
    if not all(set(contenders) & {*side} for side in (OURS, SPARK_PEERS)):
        options.error("--contender: one of ours and one Spark peer are needed to compare")
    settings = dict(SETTINGS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        if chosen.search:
            (folder / "validation").mkdir()
            digits.write(folder / "validation", validation=True)
            sessions = {each: session_of(each, folder / "validation") for each in contenders}
            settings |= search(sessions, chosen.repeats)
        turns = {each: turn(each, session_of(each, folder), settings[each]) for each in contenders}
        runs = harness.interleave(turns, repeats=chosen.repeats)
    if chosen.plot is not None:
        accuracy_curves.draw(runs, WANTED, chosen.plot)
    report(runs, settings)


def session_of(name: str, folder: Path) -> Session:
    """Returns a function that runs the fits of a plan in a fresh session of a contender."""

    def session(plan: Sequence[dict[str, Any]]) -> Fits:
        limit = SESSION_TIMEOUT_SECONDS
        if name == "elephas":
            told = fit_session.elephas(folder, json.dumps(plan), "tensorflow", timeout=limit)
        else:
            told = harness.call_child(__file__, name, str(folder), plan, timeout=limit)
        fits: Fits = told["fits"]
        return fits

    return session


def fit_ours(
    strategy: str,
    spark: SparkSession,
    data: Path,
    snapshots: Path,
    *,
    seed: int,
    epochs: int,
    learning_rate: float,
    **settings: Any,
) -> None:
    """Fits a TorchEstimator; rank 0 takes a snapshot as each epoch begins, of the one before."""
    import sparkdl
    from sparkdl.callbacks import WorkerCallback, WorkerStep
    from sparkdl.errors import NonFiniteError

    class Snapshots(WorkerCallback):
        def before_step(self, step: WorkerStep) -> None:
            if step.rank == 0 and step.epoch > 1 and step.step_of_epoch == 1:
                take_module(snapshots, step.model)

    estimator = fit_session.estimator(
        optimizer=partial(digits.make_optimizer, lr=learning_rate),
        strategy=getattr(sparkdl, strategy)(**settings),
        epochs=epochs,
        seed=seed,
        callbacks=[Snapshots()],
    )
    try:
        take_module(snapshots, estimator.fit(fit_session.read(spark, data)).module)
    except NonFiniteError:  # ends the fit; others train on, and are right by chance from then on
        for _ in range(epochs - len(list(snapshots.iterdir()))):
            take_module(snapshots, digits.build_mlp())


def fit_torch_distributor(
    spark: SparkSession, data: Path, snapshots: Path, *, epochs: int, **settings: Any
) -> None:
    """Runs DDP with TorchDistributor; rank 0 takes the snapshots."""
    taking = partial(take_module, snapshots)
    fit_session.distributed(ddp.train, data, epochs, on_epoch=taking, **settings)


def fit_averaging_loop(spark: SparkSession, data: Path, snapshots: Path, **settings: Any) -> None:
    """Runs the hand-written loop at its best; the driver takes the snapshots."""
    averaging_loop.fit(spark, data, on_epoch=partial(take_module, snapshots), **settings)


def fit_averaging_frame(spark: SparkSession, data: Path, snapshots: Path, **settings: Any) -> None:
    """Runs the hand-written loop on the DataFrame's rows; the driver takes the snapshots."""
    frame = fit_session.read(spark, data)
    averaging_loop.fit_frame(frame, on_epoch=partial(take_module, snapshots), **settings)


def fit_one_process(
    spark: SparkSession,
    data: Path,
    snapshots: Path,
    *,
    seed: int,
    epochs: int,
    learning_rate: float,
    threads: int,
) -> None:
    """Collects the rows into the driver and trains there with plain torch."""
    table = fit_session.read(spark, data).toArrow()
    features, labels = digits.tensors(table)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = digits.build_mlp()
    optimizer = digits.make_optimizer(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(features)), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
        take_module(snapshots, model)


FITS: dict[str, Callable[..., None]] = {
    "sparkdl": partial(fit_ours, "ParameterAveraging"),
    "sparkdl_all_reduce": partial(fit_ours, "GradientAllReduce"),
    "torch_distributor": fit_torch_distributor,
    "averaging_loop": fit_averaging_loop,
    "averaging_frame": fit_averaging_frame,
    "one_process": fit_one_process,
}


def fits_of_a_session(name: str, data: str, plan: list[Any]) -> dict[str, Any]:
    """Fits as the plan says in one fresh session, in which no job runs before the first fit."""
    spark = fit_session.start_session("plain")
    measured = accuracy_curves.fits(partial(FITS[name], spark), Path(data), plan)
    spark.stop()
    return {"fits": measured}


def turn(name: str, session: Session, settings: Mapping[str, Any]) -> Callable[[], Fits]:
    """Returns a function that runs a contender's next session: a first fit and the later ones."""
    seeds = itertools.count()

    def fits() -> Fits:
        common = {**settings, "epochs": EPOCHS}
        done = session([{**common, "seed": next(seeds)} for _ in range(1 + LATER_FITS)])
        there = ", ".join(f"{seconds_to(fit):.2f}" for fit in done)
        print(f"  {name}: {WANTED:.0%} after {there} s", flush=True)
        return done

    return fits


def seconds_to(fit: Mapping[str, Any]) -> float:
    """Returns the seconds that a fit took to reach the accuracy; infinity if it never did."""
    return accuracy_curves.seconds_to(fit["curve"], WANTED)


def search(sessions: Mapping[str, Session], repeats: int) -> dict[str, dict[str, Any]]:
    """Returns each contender's best settings; prints how all that were tried did."""
    best = {}
    for name, session in sessions.items():
        options = {"learning_rate": RATES, **OPTIONS.get(name, {})}
        grid = [
            dict(zip(options, each, strict=True)) for each in itertools.product(*options.values())
        ]
        tried = random.Random(7).sample(grid, min(TRIES, len(grid)))
        plan = [
            {**settings, "epochs": EPOCHS, "seed": SEARCH_SEEDS + seed}
            for seed in range(repeats)
            for settings in random.Random(seed).sample(tried, len(tried))
        ]
        done = [*zip(plan, session([plan[0], *plan])[1:], strict=True)]  # the first is no later fit
        scores = []
        for settings in tried:
            fits = [fit for planned, fit in done if settings.items() <= planned.items()]
            seconds = statistics.median(map(seconds_to, fits))
            scores.append((seconds, -statistics.median(map(last_accuracy, fits))))
            print(f"  {name} {settings}: {seconds:.2f} s, at last {-scores[-1][1]:.3f}", flush=True)
        best[name] = tried[scores.index(min(scores))]
        print(f'"{name}": {best[name]},  # of {len(tried)}', flush=True)
    return best


def last_accuracy(fit: Mapping[str, Any]) -> float:
    """Returns the accuracy at the end of a fit; none if it broke off."""
    return float(fit["curve"][-1][1]) if fit["curve"] else 0.0


def report(runs: Mapping[str, list[Fits]], settings: Mapping[str, Any]) -> None:
    """Prints medians and claims, and the JSON line.

    Args:
        runs: by contender.
        settings: by contender.
    """
    medians = {}
    for which, part in {"later fits": slice(1, None), "first fit": slice(1)}.items():
        seconds = {
            name: [seconds_to(fit) for fits in sessions for fit in fits[part]]
            for name, sessions in runs.items()
        }
        medians[which] = harness.show_each(seconds, f"{{}}, {which}", digits=2)
        if ALONE in runs:
            ours = min(medians[which][name] for name in OURS if name in runs)
            print(f"best of ours / {ALONE}, {which}: {ours / medians[which][ALONE]:.2f}")
    ends = {
        name: [last_accuracy(fit) for fits in sessions for fit in fits]
        for name, sessions in runs.items()
    }
    harness.show_each(ends, f"{{}}, test accuracy after {EPOCHS} epochs", unit="", digits=3)
    claims = [claim for which in medians for claim in claims_of(which, medians[which])]
    harness.report("time_to_accuracy", claims, {"settings": settings, "fits": runs})


def claims_of(which: str, seconds: Mapping[str, float]) -> list[harness.Claim]:
    """Returns ours / the best Spark peer, and the other ratios for those who want to choose."""
    ours, best = (
        min((name for name in names if name in seconds), key=seconds.__getitem__)
        for names in (OURS, SPARK_PEERS)
    )
    others = {f"{best}, the best Spark peer": best, **{name: name for name in SPARK_PEERS}}
    return [
        harness.claim(f"{ours} / {text}, {which}", seconds[ours], seconds[name], target=TARGET)
        for text, name in others.items()
        if name in seconds and text != best
    ]


if __name__ == "__main__":
    main()
