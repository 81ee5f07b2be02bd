"""How long an epoch takes with rounds that are cut off, and workers that really are slow.

Each worker is a process on this machine, and sleeps in each step: either all of them in turn sleep
ten times as long as usual, in one window out of ten, or always the same one sleeps three times as
long. Every row is trained on in any case, so nothing helps against the latter.
"""

import random
import time
from functools import partial
from itertools import chain
from multiprocessing import current_process

import harness
import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.strategies.arguments import Cutoff
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

RANKS, PERIOD, BATCH, USUAL_S = 4, 5, 8, 0.02
IN_TURN, ALWAYS = 10, 3
"""How many times as long as usual slow workers sleep."""


def main() -> None:
    """Runs both, and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    windows = 10 if chosen.quick else 30
    in_turn, one = (processes(slow, chosen.repeats, windows) for slow in ("in turn", "one"))
    claims = [
        harness.Claim(
            name="processes each slow at times: seconds an epoch, predicted / everyone",
            ratio=in_turn["predicted"] / in_turn["none"],
            target=0.8,
        ),
        harness.Claim(
            name="all but one / everyone", ratio=in_turn["1"] / in_turn["none"], target=0.8
        ),
        harness.Claim(
            name="one process always slow: seconds an epoch, predicted / everyone",
            ratio=one["predicted"] / one["none"],
            target=1.05,
        ),
    ]
    measured = {"slow_in_turn_epoch_s": in_turn, "one_slow_epoch_s": one}
    harness.report("cutoff_processes", claims, measured)


class Sleeps(nn.Module):
    """A linear model whose forward pass sleeps, longer in slow windows.

    Args:
        slow: ``in turn``: one window out of ten of each worker, at random; ``one``: all of rank 1.
    """

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self._slow = slow
        self._step = 0

    def forward(self, features: Tensor) -> Tensor:
        """Sleep, then compute."""
        name = current_process().name
        window, self._step = self._step // PERIOD, self._step + 1
        if self._slow == "one":
            times = ALWAYS if name == "rank 1" else 1
        else:
            times = IN_TURN if random.Random(f"{name}, window {window}").random() < 0.1 else 1
        time.sleep(USUAL_S * times)
        return self.linear(features)


def processes(slow: str, repeats: int, windows: int) -> dict[str, float]:
    """Median seconds of an epoch of ``windows`` windows, by cut-off."""
    cutoffs: tuple[Cutoff, ...] = ("none", 1, "predicted")
    contenders = {str(cutoff): partial(epochs, slow, cutoff, windows) for cutoff in cutoffs}
    return {
        name: harness.show(
            f"slow {slow}, cutoff {name}: an epoch", [*chain.from_iterable(runs)], digits=2
        )
        for name, runs in harness.interleave(contenders, repeats=repeats).items()
    }


def epochs(slow: str, cutoff: Cutoff, windows: int) -> list[float]:
    """Seconds of each epoch but the first."""
    rows = windows * PERIOD * BATCH
    draw = np.random.default_rng(0)
    shards = []
    for _ in range(RANKS):
        features = draw.normal(size=(rows, 4)).astype(np.float32)
        label = (features.sum(axis=1) > 0).astype(np.int64)
        shards.append(batches_of(rows, features=features, label=label))
    job = Job(
        model=partial(Sleeps, slow),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        strategy=ParameterAveraging(PERIOD, cutoff=cutoff),
        schema=FeedSchema(
            features=(ColumnSpec("features", torch.float32, (4,)),),
            label=ColumnSpec("label", torch.int64),
        ),
        epochs=3,
        batch_size=BATCH,
        seed=1,
        deadline_s=300.0,
    )
    outcome = run_world(job, shards, ranks_as="processes")
    history = outcome.history
    assert all(summary.examples == RANKS * rows for summary in history)
    stale = ", ".join(f"{summary.mean_staleness:.2f}" for summary in history)
    print(
        f"slow {slow}, cutoff {cutoff}: loss {history[-1].loss:.3f}, staleness {stale}", flush=True
    )
    return [summary.seconds for summary in history[1:]]


if __name__ == "__main__":
    main()
