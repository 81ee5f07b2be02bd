"""In its limits a strategy is another one, or SGD: of one worker, or without momentum."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import cloudpickle
import own_asynchronous
import own_outer_momentum
import pytest
import torch
from driver_rows import CUT_OFF, EASGD, HOGWILD
from every_row import every_row
from interruptions import same_bits
from strategy_row import SCHEDULE
from streams import OUTER, vector_of
from torch import Tensor, nn
from toys import Data, classification, mlp, relative_error, sgd_on_union
from trainings import DATA, MOMENTUM, STRATEGY, job

from sparkdl.strategies import (
    BSP,
    PBSP,
    SSP,
    AdaScale,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    GossipAveraging,
    GradientAllReduce,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)
from sparkdl.testing import run_world

for module in (sys.modules[__name__], own_asynchronous):
    cloudpickle.register_pickle_by_value(module)

ALONE, EQUAL = classification([41]), classification([24, 24, 24])
MEAN = ParameterAveraging(2, average_optimizer_state=False)
ELASTIC = replace(EASGD, mode="asynchronous")


UNDER_WAY = OuterOptimizer(4, OUTER, fragments=2, overlap=1, merge=0.5)


def normalized() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), mlp())


@dataclass(frozen=True)
class Limit:
    """Two strategies that come to the same.

    Attributes:
        strategy: one of them.
        other: the other; by default SGD in one process.
        data: the rows.
        within: the relative error; 0 is the same bits.
        settings: other changes of both jobs.
        sgd: options of SGD.
        ranks_as: what ranks are.
    """

    strategy: Strategy[Any]
    other: Strategy[Any] | None = None
    data: Data = ALONE
    within: float = 1e-12
    settings: Mapping[str, Any] = field(default_factory=dict)
    sgd: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    ranks_as: Any = "threads"

    def holds(self) -> None:
        mine = self._run(self.strategy)
        if self.other is None:
            sgd = partial(torch.optim.SGD, **self.sgd)
            oracle = sgd_on_union(mlp(), self.data, sgd, epochs=3)
        else:
            oracle = (other := self._run(self.other)).module
            assert self.within or same_bits(mine, other)
        assert relative_error(mine.module, oracle) <= self.within

    def _run(self, strategy: Strategy[Any]) -> Any:
        model = self.settings.get("model", mlp)()
        changes = {key: each for key, each in self.settings.items() if key != "model"}
        given = job(model, strategy=strategy, **changes)
        return run_world(given, self.data.shards(), ranks_as=self.ranks_as)


def averages(period: int, **options: Any) -> ParameterAveraging:
    return ParameterAveraging(period, average_optimizer_state=False, **options)


LIMITS = {
    "AdaScale, alone": Limit(
        AdaScale(), GradientAllReduce(), within=0.0, settings={"optimizer": MOMENTUM, **SCHEDULE}
    ),
    "asynchronous, alone": Limit(AsynchronousSGD(2), within=1e-9),
    "cut off, alone": Limit(CUT_OFF, within=1e-9),
    "gossip, alone": Limit(GossipAveraging()),
    "of one's own, alone": Limit(own_asynchronous.EachForItself(2), within=1e-9),
    "no outer optimizer, fragments, alone": Limit(
        OuterOptimizer(6, OuterSGD(1, 0), fragments=3), within=1e-9
    ),
    **{
        f"outer momentum {momentum} at period one, Nesterov's {nesterov}": Limit(
            OuterOptimizer(1, OuterSGD(0.7, momentum, nesterov)),
            data=DATA,
            within=1e-10,
            sgd={"lr": 0.07, "momentum": momentum, "nesterov": nesterov},
        )
        for momentum, nesterov in ((0.9, False), (0.9, True))
    },
    "the documented example, SlowMo": Limit(
        own_outer_momentum.OuterMomentum(period=2, momentum=0.6, rate=0.7), STRATEGY, DATA, 0.0
    ),
    # Of 41 rows the last minibatch has one, which BatchNorm would not take.
    "cut off, alone, of Adam": Limit(
        ParameterAveraging(2, cutoff=1),
        ParameterAveraging(2),
        classification([42]),
        1e-9,
        {"model": normalized, "optimizer": partial(torch.optim.Adam, lr=0.01), "epochs": 2},
    ),
    "hogwild, alone": Limit(HOGWILD, ELASTIC, within=1e-11),
    # With b = workers * a = 1 the center becomes the mean, weighted alike.
    "springs that sum to one": Limit(
        replace(EASGD, period=6, moving_rate=1 / 3), averages(6), EQUAL, settings={"epochs": 1}
    ),
    "delayed Nesterov without delay, alone": Limit(
        AsynchronousOuterOptimizer(DelayedNesterov(1, 0.7, 0.5), 4),
        OuterOptimizer(4, OUTER),
        settings={"optimizer": MOMENTUM},
    ),
    "delayed Nesterov without momentum, alone": Limit(
        AsynchronousOuterOptimizer(DelayedNesterov(4, 0.8, 0.0), 3), AsynchronousSGD(3, 0.2)
    ),
    "asynchronous of everyone": Limit(AsynchronousSGD(2, barrier=BSP()), MEAN, DATA),
    # Where all wait for all, the changes of equal workers add up to their mean.
    "asynchronous SSP(0)": Limit(AsynchronousSGD(2, barrier=SSP(0)), MEAN, EQUAL),
    "asynchronous PBSP(all)": Limit(AsynchronousSGD(2, barrier=PBSP(2)), MEAN, EQUAL),
    "gossip without a visit": Limit(GossipAveraging(period=100), averages(100), DATA),
    **{
        f"no threshold, {where}": Limit(
            ThresholdGradientSharing(0, period=period, aggregation=where),
            averages(period),
            DATA,
            1e-9,
            {"optimizer": MOMENTUM},
            ranks_as=ranks_as,
        )
        for where, ranks_as, period in (("driver", "threads", 1), ("executors", "processes", 3))
    },
    **{
        f"outer rate one without momentum, {state}, {wire}": Limit(
            OuterOptimizer(2, OuterSGD(1, 0), state, wire),
            ParameterAveraging(2, average_optimizer_state=state == "average", wire_dtype=wire),
            DATA,
            0.0,
            {"optimizer": MOMENTUM},
        )
        for state, wire in (("average", "float32"), ("keep", "bfloat16"))
    },
    "merged with nearly nothing": Limit(
        OuterOptimizer(4, OUTER, merge=1e-300), OuterOptimizer(4, OUTER), DATA
    ),
    # In windows as long as an epoch every fragment is sent once, after all steps.
    "fragments of one round": Limit(
        OuterOptimizer(50, OUTER, wire_dtype="bfloat16", fragments=4),
        OuterOptimizer(50, OUTER, wire_dtype="bfloat16"),
        DATA,
        0.0,
    ),
    "a reset without a state": Limit(
        replace(STRATEGY, inner_state="reset"), STRATEGY, DATA, 0.0, SCHEDULE
    ),
}
SLOW = {
    "AdaScale, of unused parameters and a sharded optimizer": Limit(
        AdaScale(find_unused_parameters=True, shard_optimizer=True),
        AdaScale(),
        classification([22, 13]),
        settings={"optimizer": MOMENTUM},
        ranks_as="processes",
    ),
    "top-k of all": Limit(
        GradientAllReduce(0.0001, compression=TopK(1)),
        GradientAllReduce(0.0001),
        classification([40, 33]),
        settings={"optimizer": MOMENTUM},
        ranks_as="processes",
    ),
}


@every_row(*LIMITS.items())
def test_in_this_limit_it_is_the_other(name: str, limit: Limit) -> None:
    limit.holds()


@pytest.mark.nightly
@every_row(*SLOW.items())
def test_in_this_limit_workers_among_themselves_are_the_other(name: str, limit: Limit) -> None:
    limit.holds()


@cache
def trained(strategy: Strategy[Any]) -> Tensor:
    """What a training ends with; several rounded ones are compared with the same exact one."""
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    return vector_of(run_world(job(strategy=strategy), DATA.shards(), ranks_as=ranks_as).module)


@every_row(
    (ParameterAveraging(1, wire_dtype="bfloat16"), ParameterAveraging(1), 64),
    # The velocity carries what a round has rounded no further than 1 / (1 - momentum) times.
    (OuterOptimizer(2, OUTER, wire_dtype="bfloat16"), OuterOptimizer(2, OUTER), 32),
    *(
        (replace(UNDER_WAY, wire_dtype=wire), UNDER_WAY, off)
        for wire, off in (("bfloat16", 64), ("float8", 8), ("float4", 2))
    ),
    *(
        (GradientAllReduce(compression=each), GradientAllReduce(), off)
        for each, off in (("fp16", 64), ("bf16", 32))
    ),
)
def test_what_is_rounded_on_its_way_ends_close_to_what_is_not(
    rounded: Strategy[Any], exact: Strategy[Any], off: float
) -> None:
    found, known = trained(rounded), trained(exact)
    moved = (known - vector_of(mlp())).norm()
    assert 0 < float((found - known).norm()) < float(moved) / off
