"""How long it takes to start, and small jobs in all.

``jobs``: wall time of ``fit()``, first and second in a session, against what others offer. MLP
784-256-128-10, 8,000 rows, batch 64, 5 epochs, 2 workers; ours averages at period 5, its default,
or reduces gradients in every step. The peers do the same job: TorchDistributor with DDP; a
hand-written broadcast / mapPartitions / treeReduce loop at the same period, and with a round an
epoch, the best period that it has; and with ``--peer elephas`` also elephas 7.3 (Keras on the
TensorFlow that it asks for, and on torch), which needs an environment and a Spark of its own (made
on first use, 3.7 GB), hence only plain sessions. Of ours and of TorchDistributor the seconds to the
first optimizer step are noted as well, ours on the last of the workers.

Every measurement is a process with a fresh session on local-cluster[2,1,2048], of the same kinds
for all (``fit_session.py``). Where ``create_session`` starts it, a first fit counts from the start
of the session: some of what a fit needs is imported then. Each fit has a seed of its own, the same
for all contenders; test accuracy stands beside the seconds.

``functions``: seconds from calling ``sparkdl.run`` to the first line of the function on the last
rank, in such a process, which runs the same function several times: the first run starts Spark's
Python processes and the ranks' server, later runs reuse them. Compared with pyspark's
TorchDistributor, whose processes import torch in each run.

``steps``: likewise, seconds from calling ``fit`` to the first step of the last worker, compared
with the first rows of a bare ``mapInArrow`` on the same files, in a session of its own.

``search``: a ``CrossValidator`` of 3 folds and 4 settings on 2,000 rows, one and two at a time,
compared with the same of pyspark.ml's ``MultilayerPerceptronClassifier`` with as many passes over
the rows; the second of a session's two.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import digits
import fit_session
import harness

OURS = ("sparkdl", "sparkdl_all_reduce")
LOOPS = ("averaging_loop", "averaging_loop_each_epoch")
ELEPHAS = {"elephas": "tensorflow", "elephas_on_torch": "torch"}
"""The backend of Keras."""
PEERS: dict[str, tuple[str, ...]] = {
    "torch_distributor": ("torch_distributor",),
    "averaging_loop": LOOPS,
    "elephas": (*ELEPHAS,),
}
TARGETS: dict[str, dict[str, float]] = {
    "torch_distributor": {
        "first fit": 0.5,
        "second fit": 0.15,
        "first step of first fit": 0.5,
        "first step of second fit": 0.15,
    },
    **{loop: {"second fit": 0.2} for loop in LOOPS},
    **{each: {"second fit": 0.4} for each in ELEPHAS},
}
RUNS = 5
FUNCTIONS_TARGET = 0.15
"""The time of a repeated run relative to TorchDistributor's."""
FIRST_STEP, LATER_STEP, SEARCH = 1.15, 2.0, 1.5
ROWS, FOLDS = 2_000, 3
PEER, MLP = "torch_distributor", "MultilayerPerceptronClassifier"
Medians = list[harness.Median]
Session = dict[str, Any]
"""What a child has measured; see fit_session.py."""


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--peer", action="append", choices=PEERS, help="a peer; the first two if left out"
    )
    options.add_argument(
        "--session",
        action="append",
        choices=fit_session.KINDS,
        help="a kind of session for all contenders; plain and created if left out",
    )
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "jobs": (jobs, 3, 1),
        "functions": (functions, 5, 1),
        "steps": (steps, 5, 1),
        "search": (search, 3, 1),
    }
    harness.measure_parts("startup", options, parts, child=lambda of, *told: CHILDREN[of](*told))


def jobs(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures whole jobs."""
    peers = [each for peer in chosen.peer or [*PEERS][:2] for each in PEERS[peer]]
    kinds = chosen.session or ["plain", "created"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns = {
            f"{contender}, {kind}": turn(contender, kind, folder)
            for contender in (*OURS, *peers)
            for kind in kinds
            if is_measured(contender, kind)
        }
        runs = harness.interleave(turns, repeats=chosen.repeats)
    return of_jobs(runs, peers, kinds)


def is_measured(contender: str, kind: str) -> bool:
    """Whether a contender runs in a kind of session: elephas has a Spark of its own, loops RDDs."""
    return kind == "plain" if contender in ELEPHAS else kind != "connect" or contender not in LOOPS


def turn(contender: str, kind: str, folder: Path) -> Callable[[], Session]:
    """Returns a function that measures a contender in a next session, with other seeds."""
    seeds = itertools.count(1, 2)

    def measured() -> Session:
        seed = next(seeds)
        if contender in ELEPHAS:
            return fit_session.elephas(folder, str(seed), ELEPHAS[contender])
        return harness.call_child(fit_session.__file__, contender, str(folder), kind, seed)

    return measured


def figures(run: Session, kind: str) -> dict[str, float]:
    """Seconds of a session's two fits, and to their first steps where these were noted."""
    first, second = run["fits"]
    before = run["session"] if kind == "created" else 0.0
    found = {"first fit": before + first["seconds"], "second fit": second["seconds"]}
    if first["first_step"] is not None:
        found["first step of first fit"] = before + first["first_step"]
        found["first step of second fit"] = second["first_step"]
    return found


def of_jobs(
    runs: dict[str, list[Session]], peers: Sequence[str], kinds: Sequence[str]
) -> tuple[list[harness.Claim], Any]:
    """Prints medians; returns the claims and what was measured."""
    medians: dict[str, dict[str, float]] = {}
    accuracies: dict[str, float] = {}
    for name, sessions in runs.items():
        kind = name.partition(", ")[2]
        scores = [fit["accuracy"] for run in sessions for fit in run["fits"]]
        accuracies[name] = harness.show(f"{name}, test accuracy", scores, unit="", digits=3)
        starts = [run["session"] for run in sessions]
        medians[name] = {"session": harness.show(f"{name}, start of session", starts, digits=2)}
        found = [figures(run, kind) for run in sessions]
        medians[name] |= {
            figure: harness.show(f"{name}, {figure}", [each[figure] for each in found], digits=2)
            for figure in found[0]
        }
    claims = [
        harness.claim(
            f"{ours} / {peer}, {kind}, {figure}",
            medians[f"{ours}, {kind}"][figure],
            medians[f"{peer}, {kind}"][figure],
            target=target,
        )
        for kind in kinds
        for ours in OURS
        for peer in peers
        for figure, target in TARGETS[peer].items()
        if f"{peer}, {kind}" in medians and (ours == OURS[0] or peer == "torch_distributor")
    ]
    measured = {"median_seconds": medians, "median_test_accuracy": accuracies, "sessions": runs}
    return claims, measured


def functions(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures how functions start."""
    _, later, found = starts_of(("sparkdl", PEER), chosen.repeats)
    name = f"sparkdl.run / {PEER}, repeated"
    return [harness.claim(name, *later, target=FUNCTIONS_TARGET)], found


def steps(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures how fits start."""
    first, later, found = starts_of(("fit", "mapInArrow"), chosen.repeats)
    claims = [
        harness.claim("first step / mapInArrow's first rows, first", *first, target=FIRST_STEP),
        harness.claim("first step / mapInArrow's first rows, later", *later, target=LATER_STEP),
    ]
    return claims, found


def starts_of(names: Sequence[str], repeats: int) -> tuple[Medians, Medians, Any]:
    """Returns each contender's medians of first and of later starts, and all of them."""
    turns = {name: partial(harness.call_child, __file__, "starts", name) for name in names}
    found = harness.interleave(turns, repeats=repeats)
    first = {name: [run["seconds"][0] for run in found[name]] for name in names}
    later = {name: [each for run in found[name] for each in run["seconds"][1:]] for name in names}
    medians = harness.show_each(first, "{}, first"), harness.show_each(later, "{}, later")
    return [*medians[0].values()], [*medians[1].values()], found


def starts(name: str) -> dict[str, list[float]]:
    """Runs a function several times in a fresh session; returns the seconds to its first line."""
    with tempfile.TemporaryDirectory() as folder:
        digits.write(Path(folder))
        spark, found = harness.session(), []
        for seed in range(RUNS):
            called = time.time()
            found.append(max(begin(name, spark, Path(folder), seed)) - called)
    return {"seconds": found}


def begin(name: str, spark: Any, folder: Path, seed: int) -> list[float]:
    """Returns when each rank began."""
    if name == PEER:
        began: list[float] = fit_session.distributed(meet)
        return began
    if name == "fit":
        _, first_step = fit_session.fit_ours("averaging", spark, folder, 1, seed)
        assert first_step is not None
        return [first_step]
    if name == "mapInArrow":
        frame = fit_session.read(spark, folder)
        return [row.at for row in frame.mapInArrow(arrivals, "at double").collect()]
    import sparkdl

    return [when for told in sparkdl.run(meet, num_workers=digits.WORKERS) for when in told]


def arrivals(batches: Any) -> Any:
    """Yields when the first rows of a task were there."""
    import pyarrow as pa

    for number, _ in enumerate(batches):
        if not number:
            yield pa.RecordBatch.from_pydict({"at": [time.time()]})


def search(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures searches among settings."""
    turns = {
        f"{name}, {parallel} at a time": partial(
            harness.call_child, __file__, "searches", name, parallel
        )
        for name in ("sparkdl", MLP)
        for parallel in (1, 2)
    }
    found = harness.interleave(turns, repeats=chosen.repeats)
    seconds = {name: [run["seconds"][-1] for run in runs] for name, runs in found.items()}
    medians = harness.show_each(seconds, digits=2)
    claims = [
        harness.claim(
            f"a search / {MLP}'s, {parallel} at a time",
            *(medians[f"{name}, {parallel} at a time"] for name in ("sparkdl", MLP)),
            target=SEARCH,
        )
        for parallel in (1, 2)
    ]
    return claims, found


def searches(name: str, parallel: int) -> dict[str, Any]:
    """Searches twice in a fresh session; returns the seconds, and each setting's accuracy."""
    from pyspark.ml.classification import MultilayerPerceptronClassifier
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    with tempfile.TemporaryDirectory() as folder:
        digits.write(Path(folder))
        spark = harness.session()
        frame = fit_session.read(spark, Path(folder)).limit(ROWS).repartition(digits.WORKERS)
        grid, passes = ParamGridBuilder(), [5, 10]
        estimator: Any
        if name == MLP:
            frame = frame.select(array_to_vector("features").alias("features"), "label")
            layers = [digits.PIXELS, 256, 128, 10]
            estimator = MultilayerPerceptronClassifier(layers=layers, seed=1)
            grid.addGrid(estimator.maxIter, passes).addGrid(estimator.blockSize, [64, 128])
        else:
            estimator = fit_session.estimator(seed=1)
            grid.addGrid(estimator.epochs, passes).addGrid(estimator.batchSize, [64, 128])
        frame.persist().count()
        seconds, accuracies = [], []
        for _ in range(2):
            validator = CrossValidator(
                estimator=estimator,
                estimatorParamMaps=grid.build(),
                evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
                numFolds=FOLDS,
                parallelism=parallel,
                seed=1,
            )
            called = time.time()
            accuracies = [round(float(each), 3) for each in validator.fit(frame).avgMetrics]
            seconds.append(time.time() - called)
    return {"seconds": seconds, "accuracies": accuracies}


CHILDREN: dict[str, Callable[..., Any]] = {"starts": starts, "searches": searches}


def meet() -> list[float]:
    """Runs on each rank; returns when each of them reached this line."""
    began = time.time()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, began)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
