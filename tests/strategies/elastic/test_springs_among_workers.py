"""Springs whose center is kept by the workers themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from members import Member, of_all
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run
from sparkdl.testing import run_world


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
        self.seen.append("committed")


def test_among_executors_a_sum_is_awaited_when_the_next_round_begins() -> None:
    group: Any = Unhurried()
    replica = Replica(mlp(), partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    run = Run(0, replica, group, rows=5, collective=group)
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    strategy = ElasticAveraging(2, aggregation="executors")
    steps = (Batch((row[0],), row[1], last=step == 4) for step in range(5))
    strategy.train_epoch(run, strategy.start(run), steps)
    assert group.seen == ["begun", "awaited"] * 3 + ["committed"]


def test_each_round_adds_up_the_parameters_once(sent: list[tuple[str, torch.dtype, int]]) -> None:
    """Two steps each and one at the end of each epoch; buffers beside it."""
    norm, net = nn.BatchNorm1d(6).double(), mlp()
    strategy = ElasticAveraging(2, aggregation="executors")
    given = make_job(nn.Sequential(norm, net), strategy=strategy, epochs=2)
    run_world(given, classification([4 * 5]).shards())
    parameters = 8 * (2 * 6 + sum(parameter.numel() for parameter in net.parameters()))
    assert Counter(octets for *_, octets in sent) == {parameters: 3 * 2, 8 * 2 * 6: 3 * 2}


class Together:
    """One of several workers, all in this process, and the driver to which they speak.

    Args:
        member: of their group.
    """

    deadline_s = 30.0
    commit_wanted = False

    def __init__(self, member: Member) -> None:
        self.index, self.members = member.index, member.members
        self.all_reduce, self._tell = member.all_reduce, member.tell

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        self.all_reduce(tensor)
        return lambda: None

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return self._tell(value)

    def commit(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Keep nothing."""


def test_what_leaves_the_replicas_arrives_in_the_center_that_each_of_them_keeps() -> None:
    """On slopes of 1, -2, 5 each step takes that times the learning rate from the sum of all."""
    slopes, lr, rows = (1.0, -2.0, 5.0), 0.1, (9, 9, 6)

    def train(member: Member) -> tuple[float, float]:
        group: Any = Together(member)
        module = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(module.weight, 4.0)
        replica = Replica(module, partial(torch.optim.SGD, lr=lr), lambda out, target: out.mean())
        count, slope = rows[member.index], slopes[member.index]
        run = Run(
            member.index, replica, group, rows=count, batch_size=1, world_size=3, collective=group
        )
        strategy = ElasticAveraging(2, moving_rate=0.3, aggregation="executors")
        state = strategy.start(run)
        row = torch.full((1, 1), slope, dtype=torch.float64), torch.zeros(1)
        steps = (Batch((row[0],), row[1], last=step == count - 1) for step in range(count))
        strategy.train_epoch(run, state, steps)
        center = module.weight.item()
        state.swap()
        saved = state.saved()
        pull = saved["pull.0"] if saved["due"] else torch.zeros(1)
        return center, float(saved["own.0"] - pull)

    ends = of_all(3, train)
    (center,) = {center for center, _ in ends}
    moved = lr * sum(slope * count for slope, count in zip(slopes, rows, strict=True))
    kept = sum(kept for _, kept in ends)
    assert center + kept == pytest.approx(4 * 4.0 - moved, rel=1e-13)
    assert abs(center - 4.0) > 0.1


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
