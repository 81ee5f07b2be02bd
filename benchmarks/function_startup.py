"""Seconds from calling ``sparkdl.run`` to the first line of the function on the last rank.

Every measurement is a process of its own with a fresh session on local-cluster[2,1,2048], which
runs the same function several times: the first run starts Spark's Python processes and the ranks'
server, later runs reuse them. Compared with pyspark's TorchDistributor, whose processes import
torch in each run and, with ``--source``, with another checkout, to compare two commits in one run.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import harness

WORKERS = 2
RUNS = 5
TARGET = 0.15
"""The time of a repeated run relative to TorchDistributor's."""
SLOWER_BY_S = 0.3
"""Seconds by which a repeated run may be slower than another checkout's."""
PEER = "torch_distributor"


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    options.add_argument("--source", type=Path, action="append", default=[], help="a checkout")
    options.add_argument("--measure", choices=("sparkdl", PEER), help=argparse.SUPPRESS)
    chosen = harness.parse(options, repeats=5)
    if chosen.measure:
        print(json.dumps({"seconds": starts(chosen.measure)}), flush=True)
        return
    sources = {"sparkdl": harness.FOLDER.parent, **{str(each): each for each in chosen.source}}
    turns = {name: lambda path=path: measured("sparkdl", path) for name, path in sources.items()}
    turns[PEER] = lambda: measured(PEER, harness.FOLDER.parent)
    found = harness.interleave(turns, repeats=chosen.repeats)
    medians = {
        name: {
            "first": harness.show(f"{name}, first run", [run[0] for run in runs]),
            "repeated": harness.show(f"{name}, later runs", [s for run in runs for s in run[1:]]),
        }
        for name, runs in found.items()
    }
    ours = medians.pop("sparkdl")
    claims = [
        harness.Claim(
            name=f"sparkdl.run / {PEER}, repeated",
            ratio=ours["repeated"] / medians[PEER]["repeated"],
            target=TARGET,
        )
    ]
    claims += [
        harness.Claim(
            name=f"sparkdl.run, repeated, less that of {source}, / {SLOWER_BY_S} s",
            ratio=(ours["repeated"] - medians[str(source)]["repeated"]) / SLOWER_BY_S,
            target=1.0,
        )
        for source in chosen.source
    ]
    medians["sparkdl"] = ours
    harness.report("function_startup", claims, {"median_seconds": medians, "seconds": found})


def measured(name: str, source: Path) -> list[float]:
    """Returns the seconds that each run of a fresh session took to start."""
    environment = harness.child_environment(source=source)
    script = harness.FOLDER / "function_startup.py"
    command = [sys.executable, script, f"--measure={name}"]
    found: list[float] = harness.run_child(command, environment=environment)["seconds"]
    print(f"  {name} of {source}: {[round(each, 2) for each in found]}", flush=True)
    return found


def starts(name: str) -> list[float]:
    """Runs a function several times in a fresh session; returns the seconds to its first line."""
    conf = {"spark.executor.memory": "2048m", "spark.ui.enabled": "false"}
    harness.session(f"local-cluster[{WORKERS},1,2048]", conf)
    found = []
    for _ in range(RUNS):
        called = time.time()
        found.append(max(begin(name)) - called)
    return found


def begin(name: str) -> list[float]:
    """Returns when each rank began."""
    if name == PEER:
        from pyspark.ml.torch.distributor import TorchDistributor

        began: list[float] = TorchDistributor(WORKERS, local_mode=False, use_gpu=False).run(meet)
        return began
    import sparkdl

    return [when for told in sparkdl.run(meet, num_workers=WORKERS) for when in told]


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
