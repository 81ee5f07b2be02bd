"""k workers at k times the learning rate, after a warm-up: as ``docs/all-reduce.md`` says."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from every_row import every
from torch.optim.lr_scheduler import LinearLR
from toys import classification, make_job, mlp, relative_error, sgd_on_union

from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world

BASE, WARM_UP = 0.02, 5
"""One worker's learning rate, and epochs."""


@every(
    ("strategy", "sizes"),
    [(GradientAllReduce(), (16, 9)), (ParameterAveraging(period=1), (16, 14, 13))],
)
def test_workers_with_the_recipes_warm_up_train_as_one_process_does(
    strategy: Strategy[Any], sizes: tuple[int, ...]
) -> None:
    """From the rate of one worker to that times the workers, over five epochs of four steps."""
    data, epochs, workers = classification(sizes), 7, len(sizes)
    outcome = run_world(
        make_job(
            mlp(),
            strategy=strategy,
            optimizer=partial(torch.optim.SGD, lr=workers * BASE, momentum=0.9, nesterov=True),
            scheduler=partial(LinearLR, start_factor=1 / workers, total_iters=WARM_UP * 4),
            scheduler_every="step",
            epochs=epochs,
        ),
        data.shards(),
        ranks_as="processes" if strategy.needs.collective else "threads",
    )
    rates = []

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=workers * BASE, momentum=0.9, nesterov=True)
        schedule = LinearLR(optimizer, 1 / workers, total_iters=WARM_UP * 4)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    oracle = sgd_on_union(mlp(), data, scheduled, epochs=epochs)
    assert relative_error(outcome.module, oracle) < 1e-9
    # Goyal et al.'s ramp, which is the same at each step as at the ends of its epochs.
    ramp = [BASE * (1 + (workers - 1) * min(step / 20, 1)) for step in range(4 * epochs)]
    np.testing.assert_allclose(rates, ramp, rtol=1e-9)
