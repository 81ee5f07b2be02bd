"""Seconds of a step with fully connected layers split over groups of workers, against all-reduce.

Every worker and the driver is on a host of its own (network namespaces, ``studies/linked_hosts``):
the classifier of AlexNet with half of its widths, 32 rows a worker, 4 hosts at 100 Mbit/s; and Das'
network of speech, 7 layers of 2,048, 32 rows a worker, 8 hosts at 1 Gbit/s. Gradients to send and
work grow alike with the widths, so half of them leave the ratio of both as it is. All hosts share
the two cores of this machine: a step's work takes as long as that of four times as many rows (two
times with 4 hosts) on hosts with a core each. Needs root.
"""

from __future__ import annotations

import itertools
import pickle
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent / "studies"))
from linked_hosts import LinkedHosts, Trial

from sparkdl.callbacks import WorkerCallback, WorkerStep
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, Hybrid
from sparkdl.testing import batches_of
from sparkdl.worker import Job

ROWS = 32
"""Of a worker's minibatch."""
PLAIN, HYBRID = "all-reduce", "hybrid"


@dataclass(frozen=True)
class Case:
    """A network on some hosts.

    Attributes:
        widths: of the first layer's inputs, and of each layer's outputs.
        hosts: one for each worker.
        mbit: of their links.
        steps: with all-reduce, and with hybrid layers; the first of them is not counted.
    """

    name: str
    widths: tuple[int, ...]
    hosts: int
    mbit: float
    steps: tuple[int, int]

    def build(self) -> nn.Module:
        """The layers, with ReLU between them."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


ALEXNET = Case("AlexNet's classifier / 2", (4608, 2048, 2048, 500), 4, 100.0, (4, 12))
SPEECH = Case("7 x 2048", (2048,) * 8, 8, 1000.0, (6, 10))


@dataclass
class Watch(WorkerCallback):
    """Writes when each step of the first worker was over."""

    path: Path

    def after_step(self, step: WorkerStep) -> None:
        """Write it."""
        if step.rank == 0:
            with self.path.open("a") as file:
                file.write(f"{time.monotonic()}\n")


def seconds_a_step(case: Case, strategy: GradientAllReduce, steps: int) -> float:
    """Trains one epoch of so many steps; returns the median of all but the first."""
    with (
        tempfile.TemporaryDirectory() as name,
        LinkedHosts(case.hosts, Path(name)) as linked,
    ):
        linked.limit(case.mbit)
        random = np.random.default_rng(0)
        features = random.normal(size=(steps * ROWS, case.widths[0])).astype(np.float32)
        labels = random.integers(0, case.widths[-1], steps * ROWS)
        shard, times = Path(name, "shard"), Path(name, "times")
        shard.write_bytes(pickle.dumps(batches_of(10_000, features=features, label=labels)))
        job = Job(
            model=case.build,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.01),
            strategy=strategy,
            schema=FeedSchema(
                (ColumnSpec("features", torch.float32, (case.widths[0],)),),
                ColumnSpec("label", torch.int64),
            ),
            epochs=1,
            batch_size=ROWS,
            seed=0,
            deadline_s=300.0,
            callbacks=(Watch(times),),
        )
        held_out = torch.from_numpy(features[:4]), torch.from_numpy(labels[:4])
        linked.train(Trial(job, [shard] * case.hosts, held_out))
        ends = [float(each) for each in times.read_text().split()]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=1)
    medians: dict[str, Any] = {}
    for case in (ALEXNET, SPEECH):
        plain, hybrid = case.steps
        strategies = {
            PLAIN: (GradientAllReduce(), plain),
            HYBRID: (GradientAllReduce(hybrid=Hybrid("*")), hybrid),
        }
        turns = {
            name: partial(seconds_a_step, case, strategy, 3 if chosen.quick else steps)
            for name, (strategy, steps) in strategies.items()
        }
        measured = harness.interleave(turns, repeats=chosen.repeats)
        medians[case.name] = {
            name: harness.show(f"{case.name}, {name}", values, unit="s a step", digits=3)
            for name, values in measured.items()
        }
    alexnet, speech = medians[ALEXNET.name], medians[SPEECH.name]
    claims = [
        harness.Claim(
            name="AlexNet's classifier, 4 hosts at 100 Mbit/s: a step, hybrid / all-reduce",
            ratio=alexnet[HYBRID] / alexnet[PLAIN],
            target=0.35,
        ),
        harness.Claim(
            name="7 x 2048, 8 hosts at 1 Gbit/s: a step, all-reduce / hybrid",
            ratio=speech[PLAIN] / speech[HYBRID],
            target=1.5,
            at_least=True,
        ),
    ]
    harness.report("hybrid_layers", claims, {"seconds_a_step": medians})


if __name__ == "__main__":
    main()
