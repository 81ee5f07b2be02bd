"""How many epochs a small CNN takes to reach a loss with K-FAC, and with the same SGD alone.

scikit-learn's 1,797 real digits of 8 x 8 pixels, 360 of them held out, on which the loss has to
reach 0.25 or less; below that, overfitting moves it as much as learning. Minibatches of 128 rows,
SGD with momentum 0.9. Both get the best of five learning rates, found on two seeds that are not
measured; K-FAC has its defaults, which are its paper's for ImageNet, with factors computed in every
step and decompositions in every tenth for the first hundred steps. One worker, in a thread: more
workers give the same values. The time of both is printed too.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from sparkdl.callbacks import Callback, Training
from sparkdl.errors import NonFiniteError
from sparkdl.events import EpochSummary
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, KFACPreconditioner
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

PIXELS = 64
HELD_OUT = 360
BATCH_SIZE = 128
EPOCHS = 12
"""The most epochs; a training that has not reached the loss by then counts as 12."""
LOSS = 0.25
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
TRIALS = (1000, 1001)
"""Seeds on which learning rates are compared."""
CONTENDERS = {
    "SGD": None,
    "K-FAC": KFACPreconditioner(),
}
SCHEMA = FeedSchema(
    (ColumnSpec("features", torch.float32, (PIXELS,)),),
    ColumnSpec("label", torch.int64),
    validation=ColumnSpec("held", torch.bool),
)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class UntilLoss(Callback):
    """Ends a fit once the loss is reached."""

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """End the fit if the loss is reached."""
        if summary.validation_loss is not None and summary.validation_loss <= LOSS:
            training.stop("the loss is reached")


def train(preconditioner: KFACPreconditioner | None, rate: float, seed: int) -> tuple[int, float]:
    """Trains until the loss is reached; returns epochs and seconds."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = len(digits.target)
    held = np.zeros(rows, dtype=bool)
    held[np.random.default_rng(seed).permutation(rows)[:HELD_OUT]] = True
    shards = [
        batches_of(
            1000,
            features=(digits.data / 16.0).astype(np.float32),
            label=digits.target.astype(np.int64),
            held=held,
        )
    ]
    job = Job(
        model=build,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=rate, momentum=0.9),
        strategy=GradientAllReduce(preconditioner=preconditioner),
        schema=SCHEMA,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        seed=seed,
        deadline_s=300.0,
    )
    try:
        history = run_world(job, shards, callbacks=[UntilLoss()]).history
    except NonFiniteError:  # the learning rate is too high
        return EPOCHS, float("nan")
    return len(history), sum(each.seconds for each in history)


def best_rate(preconditioner: KFACPreconditioner | None) -> float:
    """The learning rate that takes the fewest epochs on the seeds of ``TRIALS``."""
    return min(RATES, key=lambda rate: sum(train(preconditioner, rate, s)[0] for s in TRIALS))


def main() -> None:
    """Measures, prints and judges."""
    options = harness.arguments(__doc__, repeats=5, quick_repeats=2)
    torch.set_num_threads(1)
    rates = {name: best_rate(each) for name, each in CONTENDERS.items()}
    print(f"learning rates: {rates}", flush=True)

    def measure(name: str) -> Callable[[], tuple[int, float]]:
        seeds = iter(range(10**6))
        return lambda: train(CONTENDERS[name], rates[name], next(seeds))

    measured = harness.interleave(
        {name: measure(name) for name in CONTENDERS}, repeats=options.repeats
    )
    facts: dict[str, Any] = {"rates": rates}
    for name, values in measured.items():
        epochs = [count for count, _ in values]
        facts[f"epochs, {name}"] = harness.show(name, epochs, unit="epochs", digits=0)
        facts[f"seconds, {name}"] = harness.show(name, [seconds for _, seconds in values])
    pairs = zip(measured["K-FAC"], measured["SGD"], strict=True)
    ratio = statistics.median(mine[0] / other[0] for mine, other in pairs)
    claim = harness.Claim(name="epochs with K-FAC / with SGD alone", ratio=ratio, target=0.8)
    harness.report("kfac_epochs", [claim], facts)


if __name__ == "__main__":
    main()
