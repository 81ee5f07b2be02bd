"""k workers at k times the learning rate, after a warm-up: as ``docs/strategy-batches.md`` says."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from every_row import every
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from toys import Data, batches_by_hand, classification, make_job, mlp, relative_error

from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world

BASE, WARM_UP = 0.02, 5
"""One worker's learning rate, and epochs."""


def by_hand(data: Data, epochs: int) -> tuple[nn.Module, list[float]]:
    """Plain torch in one process, on the workers' minibatches put together.

    Returns:
        The model, and the learning rate of each step.
    """
    workers = range(len(data.sizes))
    module = mlp().train()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=len(workers) * BASE, momentum=0.9, nesterov=True
    )
    steps = -(-max(data.sizes) // 4)
    schedule = LinearLR(optimizer, start_factor=1 / len(workers), total_iters=WARM_UP * steps)
    rates = []
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in workers]
        for step in range(steps):
            parts = [plan[step] for plan in plans if step < len(plan)]
            features, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            outputs = module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            optimizer.step()
            schedule.step()
    return module, rates


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
        ranks_as="processes",
    )
    oracle, rates = by_hand(data, epochs)
    assert relative_error(outcome.module, oracle) < 1e-9
    # Goyal et al.'s ramp, which is the same at each step as at the ends of its epochs.
    ramp = [BASE * (1 + (workers - 1) * min(step / 20, 1)) for step in range(4 * epochs)]
    np.testing.assert_allclose(rates, ramp, rtol=1e-9)
