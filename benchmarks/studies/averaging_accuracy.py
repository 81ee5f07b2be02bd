"""What averaging costs in accuracy, and how much of that other strategies recover.

scikit-learn's 1,797 real digits of 8 x 8 pixels, 360 of them held out, a small MLP and plain SGD,
the same number of epochs for all. One worker trains on all rows; two train on half of them each and
exchange every 5 minibatches. Nothing is tuned: the outer optimizers have the settings of BMUF and
SlowMo for two workers, and of DiLoCo; elastic averaging has its defaults. Each seed draws different
held-out rows, initial values and orders. This does not measure time: workers are threads, without
Spark.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import (
    ElasticAveraging,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Strategy,
)
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

PIXELS = 64
HELD_OUT = 360
EPOCHS = 30
PERIOD = 5
WORKERS = 2
TOLERANCE = 0.3
"""Points of accuracy by which the best strategy may be worse than one process."""
OTHERS: dict[str, Strategy[Any]] = {
    "BMUF": OuterOptimizer(PERIOD, OuterSGD(1.0, 1 - 1 / WORKERS)),
    "SlowMo": OuterOptimizer(PERIOD, OuterSGD(1.0, 0.5, nesterov=False)),
    "DiLoCo": OuterOptimizer(PERIOD, OuterSGD(0.7, 0.9)),
    "elastic averaging": ElasticAveraging(PERIOD),
}
SCHEMA = FeedSchema(
    (ColumnSpec("features", torch.float32, (PIXELS,)),), ColumnSpec("label", torch.int64)
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, 10))


class Seeds:
    """Hands out one seed after another, the same ones to each contender."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self._features = (digits.data / 16.0).astype(np.float32)
        self._labels = digits.target.astype(np.int64)

    def measure(self, strategy: Strategy[Any], workers: int) -> Callable[[], float]:
        """Returns a function that trains with the next seed, and returns the accuracy in %."""
        seeds = iter(range(10**6))
        return lambda: self._accuracy(strategy, workers, next(seeds))

    def _accuracy(self, strategy: Strategy[Any], workers: int, seed: int) -> float:
        order = np.random.default_rng(seed).permutation(len(self._labels))
        held_out, rows = order[:HELD_OUT], order[HELD_OUT:]
        job = Job(
            model=build,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=strategy,
            schema=SCHEMA,
            epochs=EPOCHS,
            batch_size=32,
            seed=seed,
            deadline_s=120.0,
        )
        shards = [
            batches_of(1000, features=self._features[mine], label=self._labels[mine])
            for mine in np.array_split(rows, workers)
        ]
        model = run_world(job, shards).module
        with torch.inference_mode():
            predicted = model(torch.from_numpy(self._features[held_out])).argmax(dim=1)
        return 100 * float((predicted.numpy() == self._labels[held_out]).mean())


def main() -> None:
    options = harness.arguments(__doc__, repeats=10)
    torch.set_num_threads(1)
    seeds = Seeds()
    averaging = ParameterAveraging(PERIOD)
    accuracies = harness.interleave(
        {
            # The mean of a single worker: it goes on from where it is.
            "one process": seeds.measure(averaging, 1),
            "averaging": seeds.measure(averaging, WORKERS),
            **{name: seeds.measure(strategy, WORKERS) for name, strategy in OTHERS.items()},
        },
        repeats=options.repeats,
    )
    for name, values in accuracies.items():
        harness.show(f"accuracy of {name}", values, unit="%", digits=2)
    means = {name: statistics.mean(values) for name, values in accuracies.items()}
    lost = {name: means["one process"] - mean for name, mean in means.items()}
    print(", ".join(f"{name}: {points:+.2f} points lost" for name, points in lost.items()))
    best = min(OTHERS, key=lost.__getitem__)
    harness.report(
        "averaging_accuracy",
        [
            harness.Claim(
                name=f"points of accuracy lost with the best, {best} / {TOLERANCE}",
                ratio=lost[best] / TOLERANCE,
                target=1,
            )
        ],
        {
            "mean_accuracy_percent": {name: round(mean, 3) for name, mean in means.items()},
            "points_lost": {name: round(points, 3) for name, points in lost.items()},
            "seeds": options.repeats,
        },
    )


if __name__ == "__main__":
    main()
