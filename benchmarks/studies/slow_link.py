"""A large model on slow links: 25 M parameters, two workers, 100 Mbit/s.

All-reduce takes a given number of steps; the others train until they reach the same loss, or for
two such epochs. The rows have been read when the clock starts, and the model that counts is the
driver's at the end of an epoch: the time includes sending it to the workers first and getting it
back. What streaming DiLoCo has sent is compared with its formula.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from linked_hosts import LinkedHosts, Trained, Trial
from strategy_tasks import wide
from torch import nn

from sparkdl.strategies import (
    GradientAllReduce,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    TopK,
)
from sparkdl.worker import Job

WORKERS = 2
MBIT = 100.0
STEPS = 60
EPOCHS = 2
TARGET = 0.2
TOLERANCE = 0.01
DEADLINE_S = 1500.0
FRAGMENTS = 3
BLOCK = 128
"""The number of values that share a scale of one byte on the wire."""
OTHERS: dict[str, Strategy[Any]] = {
    "PowerSGD": GradientAllReduce(compression=PowerSGD(16, start_after=0)),
    "top-k": GradientAllReduce(compression=TopK(0.01)),
    "averaging, executors": ParameterAveraging(
        STEPS // 2, average_optimizer_state=False, aggregation="executors"
    ),
    "streaming DiLoCo": OuterOptimizer(
        STEPS, OuterSGD(0.7), wire_dtype="float4", fragments=FRAGMENTS, overlap=2, merge=0.5
    ),
}


def measure(*, quick: bool) -> None:
    """Runs all-reduce and the others once each, and reports.

    Args:
        quick: fewer steps, to see that it works.
    """
    steps = 4 if quick else STEPS
    task = wide(WORKERS * 32 * steps)
    job = Job(
        model=task.build,
        loss=nn.CrossEntropyLoss(),
        optimizer=task.optimizer,
        strategy=GradientAllReduce(),
        schema=task.schema(),
        epochs=1,
        batch_size=task.batch_size,
        seed=0,
        deadline_s=600.0,
    )
    parameters = sum(each.numel() for each in task.build().parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(WORKERS, Path(folder)) as hosts,
    ):
        hosts.limit(MBIT)
        trial = Trial(job, task.shards(WORKERS, Path(folder)), task.held_out())
        trained = {"all-reduce": hosts.train(trial, DEADLINE_S)}
        _show("all-reduce", trained["all-reduce"])
        for name, strategy in OTHERS.items():
            other = replace(job, strategy=strategy, epochs=EPOCHS)
            trained[name] = hosts.train(replace(trial, job=other), DEADLINE_S)
            _show(name, trained[name])
    whole = trained["all-reduce"].points[-1]
    seconds = {name: _seconds_to(whole.loss, each) for name, each in trained.items()}
    others = {name: took for name, took in seconds.items() if name in OTHERS and took}
    best = min(others, key=others.__getitem__, default="nobody")
    error = _error_of_formula(trained["streaming DiLoCo"], parameters, steps)
    harness.report(
        "strategies_slow_link",
        [
            harness.Claim(
                name=f"seconds to all-reduce's loss after {steps} steps, {best} / all-reduce",
                ratio=others.get(best, float("inf")) / whole.seconds,
                target=TARGET,
            ),
            harness.Claim(
                name=f"streaming DiLoCo's bytes / formula - 1, / {TOLERANCE}",
                ratio=error / TOLERANCE,
                target=1,
            ),
        ],
        {
            "parameters": parameters,
            "target_loss": round(whole.loss, 4),
            "seconds_to_target": seconds,
            "losses": {
                name: [(round(point.seconds, 2), round(point.loss, 4)) for point in each.points]
                for name, each in trained.items()
            },
            "megabytes_a_worker": {
                name: round(each.traffic[1].sent_payload / 1e6, 1) for name, each in trained.items()
            },
        },
    )


def _show(name: str, trained: Trained) -> None:
    told = [f"{point.seconds:.1f} s {point.loss:.3f}" for point in trained.points]
    print(f"{name}: {', '.join(told)}", flush=True)


def _seconds_to(loss: float, trained: Trained) -> float | None:
    return next((each.seconds for each in trained.points if each.loss <= loss), None)


def _error_of_formula(trained: Trained, parameters: int, steps: int) -> float:
    """How far the bytes in the busier direction of the workers' links are off the formula.

    An epoch costs R = floor((steps - 1) * fragments / period) + fragments of them up, and R - 1
    down and the center; and the center comes down at the start.
    """
    epochs = len(trained.points) - 1
    rounds = (steps - 1) * FRAGMENTS // STEPS + FRAGMENTS
    fragment = parameters / FRAGMENTS
    up = epochs * rounds * fragment * (1 / 2 + 1 / BLOCK)
    down = epochs * ((rounds - 1) * fragment * (1 + 1 / BLOCK) + 4 * parameters) + 4 * parameters
    return max(
        max(abs(each.sent_payload / up - 1), abs(each.received_payload / down - 1))
        for each in trained.traffic[1:]
    )
