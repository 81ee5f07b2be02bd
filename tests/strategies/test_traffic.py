"""How many bytes of parameters go through the driver, counted at its connections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every_row
from toys import classification, make_job, mlp, schema

from sparkdl.strategies import (
    BSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Softsync,
    Strategy,
)
from sparkdl.testing import run_world

P = sum(parameter.numel() * 8 for parameter in mlp().parameters())
"""Bytes of the model in float64."""
WORKERS, HOSTS, ROUNDS = 4, ["a", "b", "a", "b"], 2


@pytest.mark.nightly_variants(every=3)
@pytest.mark.parametrize(
    ("strategy", "received", "sent"),
    [
        (ParameterAveraging(period=2), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (
            ParameterAveraging(period=2, aggregation="hierarchical"),
            ROUNDS * len(set(HOSTS)),
            ROUNDS * len(set(HOSTS)),
        ),
        (ParameterAveraging(period=2, aggregation="executors"), 1, 0),
        (ParameterAveraging(period=2, aggregation="executors", commit_every=2), 2, 0),
        (ElasticAveraging(period=2), ROUNDS * WORKERS, ROUNDS * WORKERS),
        # Each is sent the final center besides, for it had its answer before the others.
        (ElasticAveraging(period=2, mode="asynchronous"), ROUNDS * WORKERS, (ROUNDS + 1) * WORKERS),
        (ElasticAveraging(period=2, mode="round_robin"), ROUNDS * WORKERS, (ROUNDS + 1) * WORKERS),
        (ElasticAveraging(period=2, mode="hogwild"), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (ElasticAveraging(period=2, aggregation="executors"), 1, 0),
        (AsynchronousSGD(period=2), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (AsynchronousSGD(period=2, barrier=BSP()), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (AsynchronousSGD(period=2, barrier=Softsync(3)), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (
            AsynchronousOuterOptimizer(DelayedNesterov(WORKERS), period=2),
            ROUNDS * WORKERS,
            ROUNDS * WORKERS,
        ),
        (ParameterAveraging(period=2, cutoff=1), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (ParameterAveraging(period=2, cutoff="predicted"), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (OuterOptimizer(period=2, cutoff=1), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (OuterOptimizer(period=2), ROUNDS * WORKERS, ROUNDS * WORKERS),
        (OuterOptimizer(((1, 1), (2, 4))), 4 * WORKERS, 4 * WORKERS),
        # What workers say to each other does not go through the driver.
        (GossipAveraging(), WORKERS, WORKERS),
        (GossipAveraging(mode="symmetric", topology="ring"), WORKERS, WORKERS),
        (GradientAllReduce(), 1, 0),
        (GradientAllReduce(commit_every=1), 4, 0),
    ],
    ids=str,
)
def test_the_driver_receives_and_sends_so_many_copies_of_the_parameters_an_epoch(
    strategy: Strategy, received: int, sent: int, traffic: Counter[str]
) -> None:
    data = classification([16] * WORKERS)  # four minibatches each

    run_world(make_job(mlp(), strategy=strategy), data.shards(), ranks_as="processes", hosts=HOSTS)

    assert traffic["in"] == received * P
    assert traffic["out"] == (WORKERS + sent) * P  # every worker starts with the center


@every_row(("keep", "float32", 1, 4), ("keep", "bfloat16", 1, 2), ("average", "bfloat16", 2, 2))
def test_the_driver_of_an_outer_optimizer_receives_and_sends_so_many_bytes_an_epoch(
    traffic: Counter[str], inner_state: Any, wire_dtype: Any, copies: int, octets: int
) -> None:
    """Changes but for the first and the last that a worker receives, which are the center."""
    traffic.clear()
    strategy = OuterOptimizer(1, OuterSGD(), inner_state, wire_dtype)
    data = classification([16] * WORKERS, dtype=np.float32)
    job = make_job(
        mlp().float(),
        strategy=strategy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        schema=schema(dtype=torch.float32),
    )

    run_world(job, data.shards(), ranks_as="processes")

    rounds, values = 4, P // 8
    assert traffic["in"] == WORKERS * rounds * octets * copies * values
    replies = ((rounds - 1) * octets + 4) * copies * values
    assert traffic["out"] == WORKERS * (4 * values + replies)


def scales(values: int) -> int:
    """Bytes beside so many values: one for 128 of them."""
    return math.ceil(values / 128)


@pytest.mark.nightly_variants(every=3)
@pytest.mark.parametrize(
    ("wire_dtype", "up", "down"),
    [
        ("float32", lambda n: 4 * n, lambda n: 4 * n),
        ("bfloat16", lambda n: 2 * n, lambda n: 2 * n),
        ("float8", lambda n: n + scales(n), lambda n: n + scales(n)),
        ("float4", lambda n: math.ceil(n / 2) + scales(n), lambda n: n + scales(n)),
    ],
    ids=["float32", "bfloat16", "float8", "float4"],
)
@pytest.mark.parametrize(("fragments", "overlap"), [(1, 2), (3, 1)])
def test_the_driver_of_streamed_fragments_receives_and_sends_so_many_bytes(
    wire_dtype: Any,
    up: Callable[[int], int],
    down: Callable[[int], int],
    fragments: int,
    overlap: int,
    traffic: Counter[str],
) -> None:
    """A fragment a round, but for the center at the start of the training and of each epoch."""
    period, steps, epochs = 6, 16, 2
    strategy = OuterOptimizer(period, OuterSGD(), "keep", wire_dtype, fragments, overlap, 0.5)
    data = classification([4 * steps] * WORKERS, dtype=np.float32)
    job = make_job(
        mlp().float(),
        strategy=strategy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        schema=schema(dtype=torch.float32),
        epochs=epochs,
    )

    run_world(job, data.shards(), ranks_as="processes")

    values = P // 8
    parts = [values * (k + 1) // fragments - values * k // fragments for k in range(fragments)]
    rounds = (steps - 1) * fragments // period + fragments
    of_rounds = [parts[number % fragments] for number in range(rounds)]
    assert traffic["in"] == epochs * WORKERS * sum(map(up, of_rounds))
    replies = epochs * (sum(map(down, of_rounds[:-1])) + 4 * values)
    assert traffic["out"] == WORKERS * (4 * values + replies)
