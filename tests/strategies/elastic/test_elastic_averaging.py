"""Replicas on springs: EASGD, synchronous and asynchronous."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import recorded_decisions
from springs import DATA, SIZES, STRATEGY, ByHand, Watched, as_decided, in_step, job, replicas
from torch import nn
from toys import classification, relative_error, schema

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.values.center import Center
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec, Segment
from sparkdl.strategies import Contributions, ElasticAveraging, ParameterAveraging
from sparkdl.testing import batches_of, run_world

ASYNCHRONOUS = ElasticAveraging(period=2, moving_rate=0.2, mode="asynchronous")
AMONG = ElasticAveraging(period=2, moving_rate=0.2, aggregation="executors")


def test_it_is_synchronous_easgd() -> None:
    outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, in_step(ByHand(0.2), epochs=3)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_the_paper_s_rate_is_the_default() -> None:
    outcome = run_world(job(strategy=ElasticAveraging(2)), DATA.shards())
    assert relative_error(outcome.module, in_step(ByHand(0.9 / 3), epochs=3)) < 1e-12


@pytest.mark.parametrize("nesterov", [False, True], ids=["MEASGD", "nearly EAMSGD"])
def test_with_momentum_of_the_optimizer_it_is(nesterov: bool) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=nesterov)
    outcome = run_world(job(optimizer=optimizer), DATA.shards())
    hand = in_step(ByHand(0.2, 0.8, looks_ahead=nesterov, ends_ahead=nesterov), epochs=3)
    assert relative_error(outcome.module, hand) < 1e-11


def test_it_is_asynchronous_easgd() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=ASYNCHRONOUS), DATA.shards())
    assert relative_error(outcome.module, as_decided(decisions)) < 1e-11
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    commits = [each.contributions for each in decisions if isinstance(each, do.Commit)]
    assert {len(each.weights) for each in commits} == {0, 1}
    assert max(each.staleness for each in commits) > 0


def test_alone_both_modes_are_one() -> None:
    alone = classification([42])
    both = [run_world(job(strategy=each), alone.shards()) for each in (STRATEGY, ASYNCHRONOUS)]
    assert relative_error(both[0].module, both[1].module) < 1e-11


def test_a_round_of_springs_that_sum_to_one_is_parameter_averaging() -> None:
    """With b = workers * a = 1 the center becomes the mean, weighted alike."""
    data = classification([20, 20, 20])
    springs = job(strategy=ElasticAveraging(5, moving_rate=1 / 3), epochs=1)
    mean = job(strategy=ParameterAveraging(5, average_optimizer_state=False), epochs=1)
    first, second = (run_world(each, data.shards()).module for each in (springs, mean))
    assert relative_error(first, second) < 1e-12


def normed(dropout: float = 0.0) -> nn.Module:
    """With statistics; ranks that are threads share the random numbers that dropout draws."""
    torch.manual_seed(3)
    norm, drops = nn.BatchNorm1d(8), nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drops, nn.Linear(8, 3)).double()


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


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


@given(
    rate=st.floats(0.01, 1.0),
    world_size=st.integers(1, 6),
    data=st.data(),
)
def test_the_center_moves_by_the_sum_of_the_pulls_of_those_who_are_there(
    rate: float, world_size: int, data: st.DataObject
) -> None:
    there = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    numbers = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)
    start, *places = (np.array(data.draw(numbers)) for _ in range(1 + len(there)))
    update = ElasticAveraging(1, rate).center_update
    center = Center(
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


def test_a_rate_at_which_the_center_overshoots_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"moving_rate=0.9 is too high for 3 workers.*0.5; .*0.3"):
        run_world(job(strategy=ElasticAveraging(2, moving_rate=0.9)), DATA.shards())


def test_among_executors_it_is_synchronous_easgd_too() -> None:
    outcome = run_world(job(strategy=AMONG), DATA.shards(), ranks_as="processes")
    assert relative_error(outcome.module, in_step(ByHand(0.2), epochs=3)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_among_executors_the_center_has_the_mean_of_buffers() -> None:
    driver = run_world(job(normed(), optimizer=MOMENTUM), DATA.shards())
    among = job(normed(), optimizer=MOMENTUM, strategy=AMONG)
    outcome = run_world(among, DATA.shards(), ranks_as="processes")
    first, second = outcome.module.state_dict(), driver.module.state_dict()
    for name, values in second.items():
        assert torch.allclose(first[name], values, rtol=1e-11, atol=1e-13), name


def test_among_executors_nobody_goes_alone() -> None:
    with pytest.raises(ConfigError, match="mode='asynchronous' is for aggregation='driver'"):
        ElasticAveraging(mode="asynchronous", aggregation="executors")
    with pytest.raises(ConfigError, match="aggregation must be one of driver, executors"):
        ElasticAveraging(aggregation="host")  # type: ignore[arg-type]
