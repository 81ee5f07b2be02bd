"""Every strategy on three tasks, over links of three speeds: loss by rows, by seconds and by bytes.

A CNN on scikit-learn's digits, an MLP on 270,000 flights, and a transformer on a made-up language.
Each worker is a process on a host of its own, as is the driver, on links of 100 Mbit/s to 10 Gbit/s
(``linked_hosts.py``; needs root). Nothing is tuned for any strategy but all-reduce.

Finished trainings are kept in a file and are not run again, whatever has changed since; ``--fresh``
discards them. Those of ``--quick``, of one epoch, are not kept. With ``--case slow-link``, a model
of 25 M parameters is trained instead, on links of 100 Mbit/s: seconds to the loss at which
all-reduce ends.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import slow_link
import strategy_report
import torch
from linked_hosts import LinkedHosts, Point, Trial
from strategy_tasks import TASKS, Task
from torch import nn

from sparkdl.driver import as_builder
from sparkdl.errors import NonFiniteError
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    PSSP,
    SSP,
    AdaScale,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    Barrier,
    DelayedNesterov,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    KFACPreconditioner,
    OneBitAdam,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Softsync,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)
from sparkdl.worker import Job

LINKS = (100, 1000, 10_000)
WORKERS = 4
BUDGET_S = 4.0
PERIOD = 5
LONG_PERIOD = 20
TARGET = 0.7
"""The best strategy's share of all-reduce's seconds, on the transformer at 100 Mbit/s."""
RESULTS = harness.FOLDER / "results" / "strategies.jsonl"
DOCS = harness.FOLDER.parent / "docs"
PAGE = DOCS / "notes" / "strategies.md"
PICTURE = DOCS / "strategies-on-links.svg"


@dataclass(frozen=True)
class Contender:
    """A strategy with its settings.

    Attributes:
        strategy: makes it for a number of workers.
        adam: whether it needs Adam as the optimizer.
        sgd: whether it is made for SGD, and so only for tasks that use it.
        layerwise: whether its optimizer is LARS or LAMB.
    """

    strategy: Callable[[int], Strategy[Any]]
    adam: bool = False
    sgd: bool = False
    layerwise: bool = False


def always(strategy: Strategy[Any], **settings: bool) -> Contender:
    """The same strategy for any number of workers."""
    return Contender(lambda workers: strategy, **settings)


def barred(barrier: Barrier) -> Contender:
    """Asynchronous SGD in which one change of every worker moves the center by their mean."""
    return always(AsynchronousSGD(PERIOD, barrier=barrier))


STREAMING = OuterOptimizer(
    LONG_PERIOD, OuterSGD(0.4), wire_dtype="float4", fragments=4, overlap=2, merge=0.5
)
CONTENDERS: dict[str, Contender] = {
    "all-reduce": always(GradientAllReduce()),
    "PowerSGD": always(GradientAllReduce(compression=PowerSGD(2))),
    "top-k": always(GradientAllReduce(compression=TopK(0.01))),
    "1-bit Adam": always(GradientAllReduce(compression=OneBitAdam(100)), adam=True),
    "K-FAC": always(GradientAllReduce(preconditioner=KFACPreconditioner()), sgd=True),
    "AdaScale": always(AdaScale(), sgd=True),
    "LARS or LAMB": always(GradientAllReduce(), layerwise=True),
    "averaging": always(ParameterAveraging(PERIOD)),
    "averaging, executors": always(ParameterAveraging(PERIOD, aggregation="executors")),
    "averaging, one backup": always(ParameterAveraging(PERIOD, cutoff=1)),
    "averaging, predicted cut-off": always(ParameterAveraging(PERIOD, cutoff="predicted")),
    "elastic": always(ElasticAveraging(PERIOD)),
    "elastic, asynchronous": always(ElasticAveraging(PERIOD, mode="asynchronous")),
    "elastic, Hogwild": always(ElasticAveraging(PERIOD, mode="hogwild")),
    "elastic, round robin": always(ElasticAveraging(PERIOD, mode="round_robin")),
    "elastic, executors": always(ElasticAveraging(PERIOD, aggregation="executors")),
    "ASP": barred(ASP()),
    "ASP, scaled by staleness": always(AsynchronousSGD(PERIOD, scale_by_staleness=True)),
    "SSP": barred(SSP(2)),
    "PBSP": barred(PBSP(1)),
    "PSSP": barred(PSSP(1, 2)),
    "BSP": always(AsynchronousSGD(PERIOD, barrier=BSP())),
    "softsync": Contender(
        lambda n: AsynchronousSGD(PERIOD, scale_by_staleness=True, barrier=Softsync(max(1, n // 2)))
    ),
    "threshold": always(ThresholdGradientSharing()),
    "threshold, executors": always(ThresholdGradientSharing(aggregation="executors")),
    "post-local SGD": always(OuterOptimizer(((1, 1), (2, PERIOD)), OuterSGD(1, 0))),
    "SlowMo": always(OuterOptimizer(LONG_PERIOD, OuterSGD(1, 0.5, nesterov=False))),
    "BMUF": Contender(lambda n: OuterOptimizer(PERIOD, OuterSGD(1, 1 - 1 / n))),
    "DiLoCo": always(OuterOptimizer(LONG_PERIOD)),
    "streaming DiLoCo": always(STREAMING),
    "asynchronous DiLoCo": Contender(
        # With the paper's momentum of 0.9, windows that move this far and are this stale diverge.
        lambda n: AsynchronousOuterOptimizer(DelayedNesterov(n, 0.7, 0.5), LONG_PERIOD)
    ),
    "gossip": always(GossipAveraging(PERIOD)),
    "gossip, exponential": always(GossipAveraging(PERIOD, topology="exponential")),
    "D-PSGD": always(GossipAveraging(PERIOD, mode="symmetric", topology="ring")),
}
"""By name; related strategies are next to each other."""
BY_WORKERS = (
    "all-reduce",
    "PowerSGD",
    "averaging",
    "averaging, executors",
    "streaming DiLoCo",
    "gossip",
)
"""The strategies that are also timed with two and eight workers, for the claim's task and link."""
OTHER_WORKERS = (2, 8)
CLAIMED = ("transformer", 100)
"""The task of the claim, and its Mbit/s."""


def main() -> None:
    """Runs what is missing, and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--case", choices=["grid", "slow-link"], default="grid")
    options.add_argument("--tasks", type=_names(TASKS), default=list(TASKS))
    options.add_argument("--links", type=_numbers, default=list(LINKS), help="in Mbit/s")
    options.add_argument("--strategies", type=_names(CONTENDERS), default=list(CONTENDERS))
    options.add_argument("--workers", type=_numbers, help="default: 4, and 2 and 8 for a few")
    options.add_argument("--results", type=Path, default=RESULTS, help="kept here; read first")
    options.add_argument("--fresh", action="store_true", help="discard what is kept of these")
    options.add_argument("--docs", action="store_true", help="put table and picture into docs/")
    chosen = harness.parse(options, repeats=1)
    if chosen.case == "slow-link":
        slow_link.measure(quick=chosen.quick)
        return
    if chosen.quick and chosen.docs:
        options.error("--quick is a check, not a result: leave out --docs")
    kept = {} if chosen.quick else strategy_report.read(chosen.results)
    wanted = _wanted(chosen)
    if chosen.fresh:
        kept = {key: run for key, run in kept.items() if key not in set(wanted)}
    missing = [key for key in wanted if key not in kept]
    for workers in sorted({key[2] for key in missing}):
        mine = [key for key in missing if key[2] == workers]
        _run(workers, mine, kept, None if chosen.quick else chosen.results)
    runs = list(kept.values())
    targets = {name: task.target for name, task in TASKS.items()}
    table = strategy_report.table(runs, list(CONTENDERS), targets)
    by_workers = strategy_report.table_by_workers(runs, *CLAIMED)
    print(f"{table}\n\n{by_workers}")
    if chosen.docs:
        strategy_report.insert(PAGE, "benchmarks/studies/strategies.py", table)
        strategy_report.insert(PAGE, "the same by workers", by_workers)
        strategy_report.draw(runs, targets, PICTURE)
    best = strategy_report.best_over_all_reduce(runs, *CLAIMED, targets)
    harness.report(
        "strategies",
        [
            harness.Claim(
                name=f"transformer at 100 Mbit/s: seconds to the target, {best.name} / all-reduce",
                ratio=best.ratio,
                target=TARGET,
            )
        ],
        {
            "seconds": best.seconds,
            "kept_in": None if chosen.quick else str(chosen.results),
            "runs": len(runs),
        },
    )


def _wanted(chosen: argparse.Namespace) -> list[strategy_report.Key]:
    """The trainings asked for; by default with four workers, some of them with others too."""
    grid = [
        (task, link, name, seed)
        for seed in range(chosen.repeats)
        for task in chosen.tasks
        for link in chosen.links
        for name in chosen.strategies
        if TASKS[task].plain_sgd or not CONTENDERS[name].sgd
    ]
    everywhere = chosen.workers or [WORKERS]
    wanted = [(task, link, workers, *rest) for workers in everywhere for task, link, *rest in grid]
    if chosen.workers is None:
        wanted += [
            (task, link, workers, name, seed)
            for workers in OTHER_WORKERS
            for task, link, name, seed in grid
            if (task, link) == CLAIMED and name in BY_WORKERS
        ]
    return wanted


def _names(known: Any) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(";")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} not among {'; '.join(known)}; put ; between several"
            )
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _run(
    workers: int,
    missing: Sequence[strategy_report.Key],
    kept: dict[strategy_report.Key, strategy_report.Run],
    results: Path | None,
) -> None:
    """Train what is missing, and keep it in a file; quickly if no file is given."""
    quick = results is None
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(workers, Path(folder)) as hosts,
    ):
        shards = {name: TASKS[name].shards(workers, _made(folder, name)) for name in TASKS}
        speed = None
        for key in missing:
            task, link, _, name, seed = key
            if link != speed:
                hosts.limit(link)
                speed = link
            trial = Trial(
                job_of(TASKS[task], CONTENDERS[name], workers, seed, quick=quick),
                shards[task],
                TASKS[task].held_out(),
                0.0 if quick else BUDGET_S,
                # The first includes sending the center, and is not timed.
                2 if (task, link) == CLAIMED and name in BY_WORKERS else 1,
            )
            try:
                run = strategy_report.Run(key, _points(hosts.train(trial).points))
            except RuntimeError as error:
                if NonFiniteError.__name__ not in str(error):
                    raise
                print(f"{key}: diverged", flush=True)
                continue
            kept[key] = run
            if results is not None:
                strategy_report.write(results, kept.values())
            print(run, flush=True)


def _made(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


def _points(points: Sequence[Point]) -> list[tuple[float, ...]]:
    """Rows, seconds, MB through the busiest link in its busier direction, loss."""
    return [
        (
            point.rows,
            round(point.seconds, 3),
            round(max(max(each.received, each.sent) for each in point.traffic) / 1e6, 3),
            round(point.loss, 4),
        )
        for point in points
    ]


def _optimizer_of(task: Task, contender: Contender) -> Callable[..., torch.optim.Optimizer]:
    if contender.layerwise:
        return task.layerwise
    return task.adam if contender.adam else task.optimizer


def job_of(task: Task, contender: Contender, workers: int, seed: int, *, quick: bool) -> Job:
    """The job of a contender, beginning with the same values as all others with this seed."""
    torch.manual_seed(seed)
    return Job(
        # An instance: a builder's random numbers would be drawn in yet another process.
        model=as_builder(task.build()),
        loss=nn.CrossEntropyLoss(),
        optimizer=_optimizer_of(task, contender),
        strategy=contender.strategy(workers),
        schema=task.schema(),
        epochs=1 if quick else task.epochs,
        batch_size=task.batch_size,
        seed=seed,
        deadline_s=120.0,
    )


if __name__ == "__main__":
    main()
