"""Trainings under a hundred random faults: does each end with the right model and leave nothing?

Jobs of three workers, which in turn average parameters or reduce gradients, meet faults. Parts:

- ``processes``: each worker is a process. Kill -9, SIGSTOP for up to three seconds, a reset
  connection, a message cut at a random byte, a full disk.
- ``executors``: fits on local-cluster. The same, plus kill -9 and SIGSTOP of executors' JVMs.
- ``hosts``: fits on a standalone cluster of three hosts. The same, plus hosts that are cut off or
  paused for up to 16 s, or crash. It needs root; without root it is left out, with a message.

A job is right if every epoch trained on every row once, the parameters are what they should be
(``storms.py`` says how that is known) and no process, thread, open port or file is left.
``--seed`` replays a run. Patience with silent workers is two seconds here, not fifteen.
"""

import math
import statistics
from collections import Counter
from typing import Any

import storm_executors
import storm_hosts
import storm_processes
from harness import Claim, parse, parser, report
from storms import Ended

from sparkdl.averager.coordination import membership

PARTS = {
    "processes": (storm_processes.run_part, 0.4),
    "executors": (storm_executors.run_part, 0.3),
    "hosts": (storm_hosts.run_part, 0.3),
}
"""The function that runs a part, and the part's share of the faults when all of them run."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all by default")
    options.add_argument("--seed", type=int, default=1, help="seed of the first job of each part")
    options.add_argument("--faults", type=int, default=100, help="number of faults in all")
    parsed = parse(options, repeats=1)
    faults = 20 if parsed.quick else parsed.faults
    names = parsed.parts or list(PARTS)
    shares = {name: PARTS[name][1] for name in names}
    membership.STRAGGLER_S = 2.0
    ended: list[Ended] = []
    left_out: dict[str, str] = {}
    for name in names:
        part = math.ceil(faults * shares[name] / sum(shares.values()))
        done = PARTS[name][0](parsed.seed, part)
        if isinstance(done, str):
            left_out[name] = done
            print(f"{name}: left out, for {done}")
        else:
            ended += done
    right = sum(not job.problem for job in ended) / len(ended)
    claim = Claim(name="jobs with the right end", ratio=right, target=1.0, at_least=True)
    report("chaos", [claim], {"seed": parsed.seed, **summary(ended), "left_out": left_out})


def summary(ended: list[Ended]) -> dict[str, Any]:
    differences = [job.difference for job in ended if job.difference is not None]
    kinds = Counter(kind_of(fault) for job in ended for fault in job.faults)
    return {
        "jobs": len(ended),
        "faults": sum(job.hits for job in ended),
        "kinds": dict(sorted(kinds.items())),
        "losses_seen": sum(job.losses for job in ended),
        "jobs_by_part_and_strategy": Counter(f"{job.part}, {job.strategy}" for job in ended),
        "largest_difference_of_parameters": max(differences, default=None),
        "median_seconds_a_job": statistics.median(job.seconds for job in ended),
        "problems": [f"{job.part}, seed {job.seed}: {job.problem}" for job in ended if job.problem],
    }


def kind_of(fault: str) -> str:
    """The words of a fault that do not say to whom it happened, or for how long."""
    words = fault.split()
    if "no" in words or "nobody" in words:
        return "nothing to hit"
    if words[0] in ("kill", "stop"):
        whom = "worker" if words[1] in ("worker", "rank") else "executor"
        return f"{words[0]} {whom}"
    return {"cut": "cut host", "pause": "pause host", "crash": "crash host"}.get(words[0], fault)


if __name__ == "__main__":
    main()
