"""What it costs to measure the noise of gradients while they are reduced: steps with and without.

Two workers in processes of their own, gloo, one torch thread each. Every worker has two replicas,
one for ``GradientAllReduce()`` and one that measures, in every tenth step or, as ``AdaScale``, in
each. It trains ten minibatches with the one, then the same ten with the other, in alternating
order. What is compared, pair by pair, is the processor time of all of a worker's threads, because
wall time says more about what else runs on the machine; that is printed too.

Where in memory the replicas lie may matter more than what is measured: half of the trainings swap
them, and a replica that measures nothing shows what difference remains.
"""

import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import networks
import numpy as np
import torch
from torch import nn

from sparkdl import AdaScale, GradientAllReduce
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.replica import Replica
from sparkdl.strategies import Run
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

PIXELS = 784
ROWS = 4_000
BATCH_SIZE = 64
BLOCK = 10
WARM_UP = 3
"""Pairs of blocks that are left out, because things are set up in the first steps."""
EPOCHS = 6
TARGET = 1.02
CONTROL = "nothing"
OPTIMIZER = partial(torch.optim.SGD, lr=0.01)
CONTENDERS: dict[str, GradientAllReduce] = {
    "measure_noise": GradientAllReduce(measure_noise=True),
    "AdaScale": AdaScale(),
    CONTROL: GradientAllReduce(),
}


@dataclass(frozen=True)
class InTurns(GradientAllReduce):
    """Trains two replicas, one of which measures.

    Attributes:
        contender: the name of the strategy that trains the measuring one.
        swapped: whether the measuring one is made first.
        path: where rank 0 writes the times.
    """

    contender: str = ""
    swapped: bool = False
    path: str = ""

    def start(self, run: Run) -> Any:
        """Start both replicas."""
        other = Replica(copy.deepcopy(run.replica.module), OPTIMIZER, nn.CrossEntropyLoss())
        runs = [run, replace(run, replica=other)]
        kinds = [GradientAllReduce(), CONTENDERS[self.contender]]
        states = [kind.start(each) for kind, each in zip(self._ordered(kinds), runs, strict=True)]
        self._kept.extend([runs, states, []])
        return states[0]

    def _ordered(self, pair: list[Any]) -> list[Any]:
        return pair[::-1] if self.swapped else pair

    @property
    def _kept(self) -> list[Any]:
        return self.__dict__.setdefault("kept", [])

    def train_epoch(self, run: Run, state: Any, batches: Iterable[Batch]) -> None:
        """Train block by block."""
        runs, states, times = self._kept
        remaining = iter(batches)
        while block := list(itertools.islice(remaining, BLOCK)):
            pair: dict[int, tuple[float, float]] = {}
            for which in (0, 1) if len(times) % 2 else (1, 0):
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in self._steps(runs[which], states[which], block):
                    pass
                pair[which] = (time.perf_counter() - wall, time.process_time() - cpu)
            times.append(self._ordered([pair[0], pair[1]]))
        if states[1].meter is not None:
            states[1].meter.measured()
        states[1].group.steps = 0
        self.end_epoch(run, state)
        if run.rank == 0:
            Path(self.path).write_text(json.dumps(times))

    def _steps(self, run: Run, state: Any, block: list[Batch]) -> Iterator[None]:
        for batch in block:
            run.step += 1
            for trained, loss in state.step(run.replica, iter([batch]), all_passes=False):
                run.count(trained, loss)
            state.group.steps += 1
            yield


def measure(network: str, contender: str) -> list[Any]:
    """Returns the (wall, processor) seconds without and with measuring, of each pair of blocks."""
    return [pair for swapped in (False, True) for pair in _train(network, contender, swapped)]


def _train(network: str, contender: str, swapped: bool) -> list[Any]:
    draws = np.random.default_rng(0)
    shards = [
        batches_of(
            1000,
            features=draws.normal(size=(ROWS, PIXELS)).astype(np.float32),
            label=draws.integers(0, 10, ROWS),
        )
        for _ in range(2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times"
        job = Job(
            model=networks.BUILDERS[network],
            loss=nn.CrossEntropyLoss(),
            optimizer=OPTIMIZER,
            strategy=InTurns(contender=contender, swapped=swapped, path=str(path)),
            schema=FeedSchema(
                (ColumnSpec("features", torch.float32, (PIXELS,)),),
                ColumnSpec("label", torch.int64),
            ),
            epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            seed=1,
            deadline_s=300.0,
        )
        run_world(job, shards, ranks_as="processes")
        times: list[Any] = json.loads(path.read_text())
        return times[WARM_UP:]


def main() -> None:
    """Measures, prints and judges."""
    options = harness.arguments(__doc__, repeats=3)
    turns = {
        (network, contender): partial(measure, network, contender)
        for contender in CONTENDERS
        for network in networks.BUILDERS
    }
    measured = harness.interleave(turns, repeats=options.repeats)
    claims, facts = [], {}
    for (network, contender), repeats in measured.items():
        pairs = [pair for repeat in repeats for pair in repeat]
        for which, kind in enumerate(("without", f"with {contender}")):
            milliseconds = [1000 * pair[which][1] / BLOCK for pair in pairs]
            name = f"processor time of a step {kind}, {network}"
            facts[name] = harness.show(name, milliseconds, unit="ms")
        walls = [measuring[0] / plain[0] for plain, measuring in pairs]
        name = f"{contender} / without, wall, {network}"
        facts[name] = harness.show(name, walls, unit="")
        ratios = [measuring[1] / plain[1] for plain, measuring in pairs]
        name = f"{contender} / without, {network}"
        if contender == CONTROL:
            facts[name] = harness.show(name, ratios, unit="", digits=3)
        else:
            claims.append(harness.Claim(name=name, ratio=statistics.median(ratios), target=TARGET))
    harness.report("gradient_noise", claims, facts)


if __name__ == "__main__":
    main()
