"""EAMSGD: Nesterov's momentum of the replicas, whose springs end where they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from recorded import recorded_decisions
from springs import DATA, ByHand, as_decided, in_step, job
from torch import nn
from toys import relative_error

from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging
from sparkdl.testing import run_world

MOVING = ElasticAveraging(period=2, moving_rate=0.2, momentum=0.8)
SGD = partial(torch.optim.SGD, lr=0.1)


def eamsgd() -> ByHand:
    """Zhang et al.'s algorithm 2."""
    return ByHand(0.2, 0.8, looks_ahead=True)


def test_it_is_the_paper_s_algorithm_2() -> None:
    outcome = run_world(job(strategy=MOVING, optimizer=SGD), DATA.shards())
    assert relative_error(outcome.module, in_step(eamsgd(), epochs=3)) < 1e-11


def test_it_is_not_what_momentum_of_the_optimizer_comes_to() -> None:
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True)
    outcome = run_world(job(optimizer=nesterov), DATA.shards())
    assert relative_error(outcome.module, in_step(eamsgd(), epochs=3)) > 1e-4


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild", "round_robin"])
def test_it_is_asynchronously_too(mode: str) -> None:
    strategy = ElasticAveraging(2, 0.2, 0.8, mode)  # type: ignore[arg-type]
    hand = ByHand(0.2, 0.8, looks_ahead=True, reads=mode == "hogwild")
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy, optimizer=SGD), DATA.shards())
    assert relative_error(outcome.module, as_decided(decisions, hand)) < 1e-11


def test_among_executors_it_is_too() -> None:
    strategy = ElasticAveraging(2, 0.2, 0.8, aggregation="executors")
    among = job(strategy=strategy, optimizer=SGD)
    outcome = run_world(among, DATA.shards(), ranks_as="processes")
    assert relative_error(outcome.module, in_step(eamsgd(), epochs=3)) < 1e-11


def test_two_momenta_are_refused() -> None:
    def replica(momentum: float) -> Replica:
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        return Replica(nn.Linear(2, 1), sgd, nn.MSELoss())

    MOVING.require_fits(replica(0.0))
    ElasticAveraging().require_fits(replica(0.9))
    with pytest.raises(ConfigError, match=r"momentum=0.8.* SGD already has its own"):
        MOVING.require_fits(replica(0.9))
