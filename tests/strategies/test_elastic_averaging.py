"""Elastic averaging and its momentum, in step and with workers that meet the center one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trainings
from by_hand import Springs, in_step
from every_row import every, every_row
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error
from trainings import EVEN, Point, equal_rows, normed, slope

from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run
from sparkdl.strategies.elastic_springs import NesterovMomentum
from sparkdl.testing import run_world

SPRINGY = ElasticAveraging(period=2, moving_rate=0.2)


job = partial(trainings.job, strategy=SPRINGY)


SPRINGS: dict[int, Any] = {}


@dataclass(frozen=True)
class Watched(ElasticAveraging):
    """Lets a test see the replicas when all is over."""

    def start(self, run: Run) -> Any:
        SPRINGS[run.rank] = super().start(run)
        return SPRINGS[run.rank]


def replicas() -> list[dict[str, Any]]:
    """Of each rank, what it would take up again."""
    found = []
    for _, spring in sorted(SPRINGS.items()):
        spring.swap()
        found.append(spring.saved())
    SPRINGS.clear()
    return found


NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
AMONG = ElasticAveraging(period=2, moving_rate=0.2, aggregation="executors")


MOVING = ElasticAveraging(period=2, moving_rate=0.2, momentum=0.8)


def eamsgd() -> Springs:
    """Zhang et al.'s algorithm 2."""
    return Springs(0.2, 0.8, looks_ahead=True)


def of_torch(*, nesterov: bool) -> dict[str, Any]:
    return {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=nesterov)}


IN_STEP: dict[str, tuple[dict[str, Any], Callable[[], Springs], float]] = {
    "EASGD": ({}, lambda: Springs(0.2), 1e-12),
    "the paper's rate, by default": (
        {"strategy": ElasticAveraging(2)},
        lambda: Springs(0.9 / 3),
        1e-12,
    ),
    "MEASGD": (of_torch(nesterov=False), lambda: Springs(0.2, 0.8), 1e-11),
    "nearly EAMSGD": (
        of_torch(nesterov=True),
        lambda: Springs(0.2, 0.8, looks_ahead=True, ends_ahead=True),
        1e-11,
    ),
    "EAMSGD": ({"strategy": MOVING}, eamsgd, 1e-11),
    "EASGD among executors": ({"strategy": AMONG}, lambda: Springs(0.2), 1e-12),
    "EAMSGD among executors": (
        {"strategy": replace(MOVING, aggregation="executors")},
        eamsgd,
        1e-11,
    ),
}


@every_row(*IN_STEP.items())
def test_in_step_it_is_the_papers_algorithm(name: str, given: Any) -> None:
    changes, hand, within = given
    ranks_as: Any = "processes" if "among" in name else "threads"
    outcome = run_world(job(**changes), EVEN.shards(), ranks_as=ranks_as)
    assert relative_error(outcome.module, in_step(hand(), epochs=3)) < within
    assert [row.examples for row in outcome.history] == [sum(EVEN.sizes)] * 3


def test_two_momenta_are_refused() -> None:
    def replica(momentum: float) -> Replica:
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        return Replica(nn.Linear(2, 1), sgd, nn.MSELoss())

    MOVING.require_fits(replica(0.0))
    ElasticAveraging().require_fits(replica(0.9))
    with pytest.raises(ConfigError, match=r"momentum=0.8.* SGD already has its own"):
        MOVING.require_fits(replica(0.9))


def test_buffers_are_each_replica_s_own_and_the_center_has_their_mean() -> None:
    outcome = run_world(job(normed(), strategy=Watched(2)), EVEN.shards())
    norm = outcome.module[1]
    found = replicas()
    # Rank 2 had no part in the epoch's last round.
    assert len({each["own.1"].sum().item() for each in found}) == 3
    assert [int(each["own.2"]) for each in found] == [10 * 3, 9 * 3, 6 * 3]
    mean = (found[0]["own.1"] + found[1]["own.1"]) / 2
    assert torch.allclose(torch.cat([norm.running_mean, norm.running_var]), mean, rtol=1e-12)


def test_asynchronously_a_worker_pulls_the_center_s_buffers() -> None:
    alone = classification([8])
    strategy = Watched(2, moving_rate=0.2, mode="asynchronous")
    norm = run_world(job(normed(), strategy=strategy, epochs=1), alone.shards()).module[1]
    (found,) = replicas()
    began = torch.cat([torch.zeros(8), torch.ones(8)]).double()
    expected = began + 0.2 * (found["own.1"] - began)
    assert torch.allclose(torch.cat([norm.running_mean, norm.running_var]), expected, rtol=1e-12)


def test_among_executors_the_center_has_the_mean_of_buffers() -> None:
    driver = run_world(job(normed(), optimizer=NESTEROV), EVEN.shards())
    among = job(normed(), optimizer=NESTEROV, strategy=AMONG)
    outcome = run_world(among, EVEN.shards(), ranks_as="processes")
    first, second = outcome.module.state_dict(), driver.module.state_dict()
    for name, values in second.items():
        assert torch.allclose(first[name], values, rtol=1e-11, atol=1e-13), name


CURVATURE = np.array([0.3, 1.0, 4.0])


def test_parameters_move_as_torch_s_do_and_the_place_is_the_one_before_the_look_ahead() -> None:
    """On a bowl; x and v of Sutskever et al. in numpy."""
    ours, torchs = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain = torch.optim.SGD([ours], lr=0.05)
    nesterov = torch.optim.SGD([torchs], lr=0.05, momentum=0.9, nesterov=True)
    momentum = NesterovMomentum(0.9, [ours.detach()])
    x, v = np.ones(3), np.zeros(3)
    for _ in range(30):
        for parameter, optimizer in ((ours, plain), (torchs, nesterov)):
            parameter.grad = parameter.detach() * torch.from_numpy(CURVATURE)
            optimizer.step()
        momentum.after_step([ours.detach()])
        momentum.leave([ours.detach()])
        v = 0.9 * v - 0.05 * CURVATURE * (x + 0.9 * v)
        x = x + v
        assert np.allclose(ours.detach(), torchs.detach(), rtol=1e-12, atol=1e-15)
        place = ours.detach().clone()
        momentum.to_places([place])
        assert np.allclose(place, x, rtol=1e-12, atol=1e-15)


@every("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_small_velocities_add_up(dtype: torch.dtype) -> None:
    """Each step is one unit in the last place, of which half precision could not keep a tenth."""
    values = torch.ones(1, dtype=dtype)
    unit = torch.finfo(dtype).eps
    momentum = NesterovMomentum(0.9, [values])
    for _ in range(8):
        values += unit
        momentum.after_step([values])
        momentum.leave([values])
    (velocity,) = momentum.saved().values()
    assert velocity.dtype is torch.float32
    assert float(velocity) == pytest.approx(unit * (1 - 0.9**8) / (1 - 0.9), rel=1e-5)


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


HOGWILD = ElasticAveraging(period=2, moving_rate=0.2, mode="hogwild")


class Exchanges:
    """Takes down when a worker begins an exchange and when it ends one."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.run: Any = None

    def begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.said.append(("begin", window.step))

    def end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        self.said.append(("end", self.run.step))

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.said.append(("last", window.step))


def test_hogwild_workers_wait_for_no_round_trip_but_an_epoch_s_last() -> None:
    exchanges = Exchanges()
    replica = Replica(Point(1.0), partial(torch.optim.SGD, lr=0.1), slope)
    exchanges.run = run = Run(0, replica, exchanges)  # type: ignore[arg-type]
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1)
    batches = (Batch((row[0],), row[1], last=step == 6) for step in range(7))
    HOGWILD.train_epoch(run, HOGWILD.start(run), batches)
    between = [("begin", 2), ("end", 4), ("begin", 4), ("end", 6), ("begin", 6), ("end", 7)]
    assert exchanges.said == [*between, ("last", 7)]


@every("momentum", [0.0, 0.7])
@every("mode", ["synchronous", "asynchronous", "hogwild", "round_robin"])
def test_what_leaves_the_replicas_arrives_in_the_center(mode: Any, momentum: float) -> None:
    """On slopes of 1, -2, 5 each step takes that times the learning rate from the sum of all."""
    data, strategy = equal_rows(1.0, -2.0, 5.0, steps=9), Watched(2, 0.3, momentum, mode)
    sloping = job(Point(4.0), loss=slope, strategy=strategy, batch_size=1)
    center = run_world(sloping, data.shards()).module.place.item()
    found = replicas()
    assert all(each["due"] for each in found)
    kept = sum(each["own.0"] - each["pull.0"] for each in found)
    if momentum:
        kept -= momentum * sum(each["velocity.0"] for each in found)
    # A step goes as far as all before, each momentum times as far as the one after it.
    steps = sum((1 - momentum**step) / (1 - momentum) for step in range(1, 9 * 3 + 1))
    moved = 0.1 * (1 - 2 + 5) * steps
    assert center + float(kept) == pytest.approx(4 * 4.0 - moved, rel=1e-12)
    assert len({float(each["own.0"]) for each in found}) == 3
