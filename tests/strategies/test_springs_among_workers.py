"""Springs whose center is kept by the workers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from toys import mlp

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run


class Unhurried:
    """A group of one worker, whose sums are there when they are waited for."""

    index, members, deadline_s, commit_wanted = 0, (0,), 30.0, False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        self.seen.append("begun")
        return lambda: self.seen.append("awaited")

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value]

    def commit(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.seen.append("handed over")


def test_among_executors_a_sum_is_awaited_when_the_next_round_begins() -> None:
    group: Any = Unhurried()
    replica = Replica(mlp(), partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    run = Run(0, replica, group, rows=5, collective=group)
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    strategy = ElasticAveraging(2, aggregation="executors")
    steps = (Batch((row[0],), row[1], last=step == 4) for step in range(5))
    strategy.train_epoch(run, strategy.start(run), steps)
    assert group.seen == ["begun", "awaited"] * 3 + ["handed over"]


RATE, APART = 0.01, 0.125


def half_precision_run() -> Run:
    module = nn.Linear(6, 3).bfloat16()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    replica = Replica(module, partial(torch.optim.SGD, lr=0.0), nn.CrossEntropyLoss())
    group: Any = Unhurried()
    return Run(0, replica, group, rows=10, collective=group)


def train(run: Run, state: Any) -> None:
    """Ten rounds, in which the replica stays where it is: all else is less than it can move."""
    row = torch.ones(1, 6, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    steps = (Batch((row[0],), row[1], last=step == 9) for step in range(10))
    STRATEGY.train_epoch(run, state, steps)


STRATEGY = ElasticAveraging(1, moving_rate=RATE, aggregation="executors")


def pulled(run: Run) -> Any:
    """A spring whose replica is away from its center."""
    state = STRATEGY.start(run)
    state.restore({**state.saved(), "own.0": state.saved()["own.0"] + APART})
    return state


def test_pulls_too_small_for_half_precision_move_the_center_among_executors() -> None:
    run = half_precision_run()
    state = pulled(run)
    for _ in range(2):
        train(run, state)
    (center,) = run.replica.segments(with_optimizer=False)
    moved = APART * (1 - (1 - RATE) ** 20)
    torch.testing.assert_close(center.float(), torch.full((21,), 1 + moved), rtol=0, atol=0.004)


def test_a_center_of_half_precision_goes_on_where_it_was() -> None:
    run = half_precision_run()
    state = pulled(run)
    train(run, state)
    center = [values.clone() for values in run.replica.segments(with_optimizer=False)]
    state.swap()  # as while the replica trains, when states are saved
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.saved().items()}
    state.swap()
    train(run, state)

    again = half_precision_run()
    for values, held in zip(again.replica.segments(with_optimizer=False), center, strict=True):
        values.copy_(held)
    resumed = STRATEGY.start(again)
    resumed.restore(saved)
    train(again, resumed)
    for spring in (state, resumed):
        spring.swap()
    found, expected = resumed.saved(), state.saved()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, Tensor):
            assert torch.equal(found[name], values), name
