"""Wall time of ``fit()`` on a small job, first and second in a session, against what others offer.

The job: MLP 784-256-128-10, 8,000 rows, batch 64, 5 epochs, 2 workers; ours averages at period 5,
its default, or reduces gradients in every step. The peers do the same job: TorchDistributor with
DDP; a hand-written broadcast / mapPartitions / treeReduce loop at the same period, and with a round
an epoch, the best period that it has; and with ``--peer elephas`` also elephas 7.3 (Keras on the
TensorFlow that it asks for, and on torch), which needs an environment and a Spark of its own (made
on first use, 3.7 GB), hence only plain sessions. Of ours and of TorchDistributor the seconds to the
first optimizer step are noted as well, ours on the last of the workers.

Every measurement is a process with a fresh session on local-cluster[2,1,2048], of the same kinds
for all (``prepared.py``). Where ``create_session`` starts it, a first fit counts from the start of
the session: some of what a fit needs is imported then. Each fit has a seed of its own, the same for
all contenders; test accuracy stands beside the seconds. With ``--source`` ours is compared with
another checkout instead, also on five files and with ``GradientAllReduce``.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import checkouts
import digits
import harness
import prepared

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
Session = dict[str, Any]
"""What a child has measured; see fit_session.py."""


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--peer", action="append", choices=PEERS, help="a peer; the first two if left out"
    )
    options.add_argument("--source", type=Path, help="a checkout to compare with, and nothing else")
    prepared.add_option(options, default="plain and prepared")
    chosen = harness.parse(options, repeats=3)
    if chosen.source:
        checkouts.compare(chosen.source, repeats=chosen.repeats)
        return
    peers = [each for peer in chosen.peer or [*PEERS][:2] for each in PEERS[peer]]
    kinds = chosen.session or ["plain", "prepared"]
    python = harness.peer_python("elephas") if "elephas" in peers else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        if "prepared" in kinds:
            prepared.prepare(folder / "cache")
        turns = {
            f"{contender}, {kind}": turn(contender, kind, folder, python)
            for contender in (*OURS, *peers)
            for kind in kinds
            if is_measured(contender, kind)
        }
        runs = harness.interleave(turns, repeats=chosen.repeats)
    report(runs, peers, kinds)


def is_measured(contender: str, kind: str) -> bool:
    """Whether a contender runs in a kind of session: elephas has a Spark of its own, loops RDDs."""
    return kind == "plain" if contender in ELEPHAS else kind != "connect" or contender not in LOOPS


def turn(contender: str, kind: str, folder: Path, python: Path | None) -> Callable[[], Session]:
    """Returns a function that measures a contender in a next session, with other seeds."""
    if contender in ELEPHAS:
        command: list[str | Path] = [python or "", harness.FOLDER / "peers" / "elephas_job.py"]
        given: list[str | Path] = [folder]
    else:
        command = [sys.executable, harness.FOLDER / "fit_session.py"]
        given = [contender, folder, f"--session={kind}", "--seed"]
    environment = prepared.environment_of(kind, folder / "cache", Path(command[0]))
    environment |= {"KERAS_BACKEND": ELEPHAS.get(contender, "")}
    seeds = itertools.count(1, 2)

    def measured() -> Session:
        child = harness.run_child([*command, *given, str(next(seeds))], environment=environment)
        print(f"  {contender}, {kind}: {child}", flush=True)
        return child

    return measured


def figures(run: Session, kind: str) -> dict[str, float]:
    """Seconds of a session's two fits, and to their first steps where these were noted."""
    first, second = run["fits"]
    before = run["session"] if kind in ("created", "prepared") else 0.0
    found = {"first fit": before + first["seconds"], "second fit": second["seconds"]}
    if first["first_step"] is not None:
        found["first step of first fit"] = before + first["first_step"]
        found["first step of second fit"] = second["first_step"]
    return found


def report(runs: dict[str, list[Session]], peers: Sequence[str], kinds: Sequence[str]) -> None:
    """Prints medians and claims, and the JSON line."""
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
        harness.Claim(
            name=f"{ours} / {peer}, {kind}, {figure}",
            ratio=medians[f"{ours}, {kind}"][figure] / medians[f"{peer}, {kind}"][figure],
            target=target,
        )
        for kind in kinds
        for ours in OURS
        for peer in peers
        for figure, target in TARGETS[peer].items()
        if f"{peer}, {kind}" in medians and (ours == OURS[0] or peer == "torch_distributor")
    ]
    measured = {"median_seconds": medians, "median_test_accuracy": accuracies, "sessions": runs}
    harness.report("whole_job", claims, measured)


if __name__ == "__main__":
    main()
