"""Elastic averaging and its momentum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import center_of
from decided import do
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from replayed import recorded_decisions
from springs import DATA, SIZES, ByHand, Watched, as_decided, in_step, job, replicas
from torch import nn
from toys import classification, relative_error, schema
from trainings import normed

from sparkdl.errors import ConfigError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec, Segment
from sparkdl.replica import Replica
from sparkdl.strategies import Contributions, ElasticAveraging
from sparkdl.strategies.elastic.nesterov import NesterovMomentum
from sparkdl.testing import batches_of, run_world

ASYNCHRONOUS = ElasticAveraging(period=2, moving_rate=0.2, mode="asynchronous")
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
AMONG = ElasticAveraging(period=2, moving_rate=0.2, aggregation="executors")


MOVING = ElasticAveraging(period=2, moving_rate=0.2, momentum=0.8)


def eamsgd(*, reads: bool = False) -> ByHand:
    """Zhang et al.'s algorithm 2."""
    return ByHand(0.2, 0.8, looks_ahead=True, reads=reads)


def of_torch(*, nesterov: bool) -> dict[str, Any]:
    return {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=nesterov)}


IN_STEP: dict[str, tuple[dict[str, Any], Callable[[], ByHand], float]] = {
    "EASGD": ({}, lambda: ByHand(0.2), 1e-12),
    "the paper's rate, by default": (
        {"strategy": ElasticAveraging(2)},
        lambda: ByHand(0.9 / 3),
        1e-12,
    ),
    "MEASGD": (of_torch(nesterov=False), lambda: ByHand(0.2, 0.8), 1e-11),
    "nearly EAMSGD": (
        of_torch(nesterov=True),
        lambda: ByHand(0.2, 0.8, looks_ahead=True, ends_ahead=True),
        1e-11,
    ),
    "EAMSGD": ({"strategy": MOVING}, eamsgd, 1e-11),
    "EASGD among executors": ({"strategy": AMONG}, lambda: ByHand(0.2), 1e-12),
    "EAMSGD among executors": (
        {"strategy": replace(MOVING, aggregation="executors")},
        eamsgd,
        1e-11,
    ),
}


@every(("name", "given"), IN_STEP.items())
def test_in_step_it_is_the_papers_algorithm(name: str, given: Any) -> None:
    changes, hand, within = given
    ranks_as: Any = "processes" if "among" in name else "threads"
    outcome = run_world(job(**changes), DATA.shards(), ranks_as=ranks_as)
    assert relative_error(outcome.module, in_step(hand(), epochs=3)) < within
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_eamsgd_is_not_what_momentum_of_the_optimizer_comes_to() -> None:
    outcome = run_world(job(**of_torch(nesterov=True)), DATA.shards())
    assert relative_error(outcome.module, in_step(eamsgd(), epochs=3)) > 1e-4


AS_DECIDED = [
    *((ASYNCHRONOUS, False), (replace(ASYNCHRONOUS, mode="hogwild"), True)),
    *((replace(MOVING, mode=mode), mode == "hogwild") for mode in ("asynchronous", "hogwild")),
    (replace(MOVING, mode="round_robin"), False),
]


@every(("strategy", "reads"), AS_DECIDED)
def test_one_by_one_it_is_the_papers_algorithm_too(strategy: Any, reads: bool) -> None:
    hand = eamsgd(reads=reads) if strategy.momentum else ByHand(0.2, reads=reads)
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy), DATA.shards())
    assert relative_error(outcome.module, as_decided(decisions, hand)) < 1e-11
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    commits = [each.contributions for each in decisions if isinstance(each, do.commit)]
    assert reads or {len(each.weights) for each in commits} == {0, 1}
    assert strategy.mode == "round_robin" or max(each.staleness for each in commits) > 0


def test_two_momenta_are_refused() -> None:
    def replica(momentum: float) -> Replica:
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        return Replica(nn.Linear(2, 1), sgd, nn.MSELoss())

    MOVING.require_fits(replica(0.0))
    ElasticAveraging().require_fits(replica(0.9))
    with pytest.raises(ConfigError, match=r"momentum=0.8.* SGD already has its own"):
        MOVING.require_fits(replica(0.9))


def test_the_center_is_what_is_validated() -> None:
    plain, held = schema(), ColumnSpec("held", torch.bool)
    columns = FeedSchema(plain.features, plain.label, validation=held)
    shards = [
        batches_of(5, features=features, label=targets, held=np.arange(len(targets)) % 3 == 0)
        for features, targets in map(DATA.shard, range(3))
    ]
    outcome = run_world(job(normed(), schema=columns), shards)
    mine = [(f[::3], t[::3]) for f, t in map(DATA.shard, range(3))]
    features, targets = (torch.from_numpy(np.concatenate(each)) for each in zip(*mine, strict=True))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(outcome.module(features), targets)
    assert outcome.history[-1].validation_loss == pytest.approx(float(loss), rel=1e-12)


def test_buffers_are_each_replica_s_own_and_the_center_has_their_mean() -> None:
    outcome = run_world(job(normed(), strategy=Watched(2)), DATA.shards())
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


@given(rate=st.floats(0.01, 1.0), world_size=st.integers(1, 6), data=st.data())
def test_the_center_moves_by_the_sum_of_the_pulls_of_those_who_are_there(
    rate: float, world_size: int, data: st.DataObject
) -> None:
    there = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    numbers = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)
    start, *places = (np.array(data.draw(numbers)) for _ in range(1 + len(there)))
    update = ElasticAveraging(1, rate).center_update
    center = center_of(
        (Segment("parameters", torch.float64, 4),),
        [torch.from_numpy(start.copy())],
        world_size,
        ElasticAveraging().wire_format,
        update,
    )
    total = center.open_sum(there)
    for rank, place in zip(there, places, strict=True):
        total.declare(rank, 1)
        total.add(rank, 0, torch.from_numpy(place))
    center.commit(Contributions((1,) * len(there), world_size))
    expected = start + sum(rate * (place - start) for place in places)
    assert np.allclose(center.values[0].numpy(), expected, rtol=1e-9, atol=1e-9)


def test_among_executors_the_center_has_the_mean_of_buffers() -> None:
    driver = run_world(job(normed(), optimizer=NESTEROV), DATA.shards())
    among = job(normed(), optimizer=NESTEROV, strategy=AMONG)
    outcome = run_world(among, DATA.shards(), ranks_as="processes")
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
        momentum.to_place(place, 0)
        assert np.allclose(place, x, rtol=1e-12, atol=1e-15)


def test_without_momentum_nothing_is_kept_and_nothing_moves() -> None:
    values = torch.ones(3)
    momentum = NesterovMomentum(0.0, [values])
    values += 1
    momentum.after_step([values])
    momentum.leave([values])
    momentum.to_place(values, 0)
    assert values.tolist() == [2.0] * 3
    assert momentum.saved() == {}


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
