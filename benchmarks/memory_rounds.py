"""Memory of driver and workers over a thousand rounds: does resident memory stay flat?

Four workers, each a process, train the network of the other benchmarks (0.94 MB of parameters) with
a round after every minibatch and a checkpoint after every epoch of twenty. A list that grew by a
kilobyte per round would show as a megabyte.
"""

import tempfile

import recovery
from harness import Claim, parse, parser, report

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import WindowReport
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

FLAT = 1.02
"""The growth allowed for what the allocator may keep."""


def main() -> None:
    """Measures and reports."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1000)
    chosen = parse(options, repeats=1)
    rounds = 200 if chosen.quick else chosen.rounds
    looks = (100, rounds // 2, rounds - 5)
    resident = measure(rounds, looks)
    for number, (driver, *workers) in resident.items():
        shown = ", ".join(f"{mb:.1f}" for mb in workers)
        print(f"round {number}: driver {driver:.1f} MB, largest worker {shown} MB")
    early, late = resident[looks[0]], resident[looks[-1]]
    claims = [
        Claim(name=f"{who}'s memory, round {looks[-1]} / {looks[0]}", ratio=b / a, target=FLAT)
        for who, a, b in zip(("driver", "a worker"), early, late, strict=True)
    ]
    report("memory_rounds", claims, {"resident_mb_of_driver_and_largest_worker": resident})


def measure(rounds: int, looks: tuple[int, ...]) -> dict[int, list[float]]:
    """Returns the resident megabytes of the driver and of its largest worker, by round.

    Args:
        rounds: how many to run.
        looks: the rounds after which to measure.
    """
    resident: dict[int, list[float]] = {}
    committed = 0

    def look(event: object) -> None:
        nonlocal committed
        if isinstance(event, WindowReport) and event.rank == 0:
            committed += 1
            if committed in looks:
                resident[committed] = recovery.resident_mb()

    with tempfile.TemporaryDirectory() as folder:
        run_world(
            recovery.job(rounds // 20, ParameterAveraging(1), rows_a_batch=2),
            recovery.shards(40 * recovery.WORKERS),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=look,
        )
    return resident


if __name__ == "__main__":
    main()
