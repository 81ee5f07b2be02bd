"""One row a strategy: its settings, and what comes of it where a training is cut short.

A new strategy gets one row here, and all tests of this folder with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import own_asynchronous
import own_drifting
import own_outer_momentum
import springs
import torch
from replayed import ByHand, Delayed, HeavyBall
from streams import ROUNDED, STREAMS
from streams import AsDecided as AsDecidedInFragments
from streams import ByHand as FragmentsByHand
from support.replay import replay
from thresholds import AMONG as SHARED_AMONG
from thresholds import STRATEGY as SHARED
from thresholds import ByHand as SharedByHand
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, relative_error
from trainings import ADAGRAD, ADAM, DATA, MOMENTUM, SGD, STRATEGY, normed

from sparkdl.averager.coordination import decisions as do
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    SSP,
    AdaScale,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    GossipAveraging,
    GradientAllReduce,
    KFACPreconditioner,
    OneBitAdam,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    TopK,
)
from sparkdl.worker import Job

TWO = classification([40, 33])
SCHEDULE = {
    "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97),
    "scheduler_every": "step",
}
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Killed:
    """What is known of a center whose worker was killed and came back, while others went on.

    Attributes:
        oracle: what a run's decisions, and its commits, come to.
        within: the relative error.
    """

    oracle: Callable[[list[do.Decision], list[Any]], nn.Module]
    within: float = 1e-9


@dataclass(frozen=True)
class Row:
    """A strategy, and what has to hold of it.

    Attributes:
        name: of its tests.
        strategy: with all its settings.
        settings: other changes of the job.
        model: what is trained where no worker is killed.
        data: the rows.
        ranks_as: what ranks are where nobody is killed.
        every_rounds: how often there is a checkpoint; by default each epoch.
        resumed: interrupted behind so many commits, it ends in the bits of one that was not.
        alone: the same of one worker with 42 rows, for strategies whose order is by chance.
        goes_on: interrupted behind so many commits, it counts each row once an epoch, and learns.
        killed: what the center is when a killed worker has come back alone; SGD has no settings.
        killed_learns: where nothing more is known of the center.
        restarted: all workers start again as one was killed, and it ends in the bits of one where
            none was, with these changes of the job. Where they could come back alone, they
            reshuffle their rows.
        restarted_learns: where the order is by chance.
        twice: two runs end in the same bits.
        killed_after: passes of the killed worker.
        slow: which of these, by name, take more than about 5 s.
    """

    name: str
    strategy: Strategy[Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = mlp
    data: Data = DATA
    ranks_as: Any = "threads"
    every_rounds: int | None = 1
    resumed: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    goes_on: tuple[int, ...] = ()
    killed: Killed | None = None
    killed_learns: bool = False
    restarted: Mapping[str, Any] | None = None
    restarted_learns: bool = False
    twice: bool = False
    killed_after: int = 12
    slow: tuple[str, ...] = ()

    def job(self, model: nn.Module | None = None, **changes: Any) -> Job:
        settings = {"epochs": 3, "max_failures": 1, **self.settings, **changes}
        return make_job(model or self.model(), strategy=self.strategy, **settings)

    def starts_all_again(self) -> dict[str, Any]:
        """Changes of the job by which workers cannot be replaced one by one."""
        alone = self.strategy.needs.resumes_alone
        return {"feed": FeedOptions(reshuffle_every=1)} if alone else {}


def followed(make: Callable[[], Any], within: float = 1e-9) -> Killed:
    """By an oracle that follows decisions."""
    return Killed(lambda decisions, _: make().follow(decisions), within)


def on_springs(reads: bool = False) -> Killed:
    by_hand = partial(springs.ByHand, 0.2, reads=reads)
    return Killed(lambda decisions, _: springs.as_decided(decisions, by_hand()), 1e-11)


class Momentum:
    """Outer momentum in float64 numpy, of which there are two strategies."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - values for new, values in zip(mean, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + c for v, c in zip(before, changes, strict=True)]
        return [torch.from_numpy(o + 0.7 * v) for o, v in zip(old, self.velocity, strict=True)]


def with_momentum(strategy: Strategy[Any]) -> Killed:
    job = make_job(mlp(), strategy=strategy, epochs=3, max_failures=1)
    return Killed(
        lambda _, commits: replay(job, DATA.shards(), commits, Momentum().move), within=1e-12
    )


def in_fragments(strategy: OuterOptimizer) -> Killed:
    def follow(decisions: list[do.Decision], _: Any) -> nn.Module:
        oracle = AsDecidedInFragments(strategy, SGD).follow(decisions)
        undisturbed = FragmentsByHand(strategy, SGD).train(3)
        assert relative_error(oracle, undisturbed) > 1e-6  # the killed one has cost something
        return oracle

    return Killed(follow, 1e-8)


EASGD = springs.STRATEGY
HOGWILD = replace(EASGD, mode="hogwild")
OUTER = STRATEGY
CUT_OFF = ParameterAveraging(2, average_optimizer_state=False, cutoff=1)
PREDICTED = ParameterAveraging(2, cutoff="predicted")
OUTER_CUT_OFF = OuterOptimizer(2, OuterSGD(0.7, 0.5, nesterov=False), cutoff=1)
ASYNCHRONOUS = AsynchronousSGD(period=2, rate=0.8)
DELAYED = AsynchronousOuterOptimizer(DelayedNesterov(3, 0.7, 0.5), period=2)
LOW_RANK = PowerSGD(1, start_after=3, min_compression_rate=0)
RING = GossipAveraging(1, "symmetric", "ring")
OWN_MOMENTUM = own_outer_momentum.OuterMomentum(period=2, momentum=0.6, rate=0.7)
OWN_ASYNCHRONOUS = own_asynchronous.EachForItself(period=2, rate=0.8)
NOISY = {"model": partial(normed, dropout=0.3)}
DELAYS = {"optimizer": partial(torch.optim.SGD, lr=0.05), **SCHEDULE}
OF_TWO: dict[str, Any] = {"data": TWO, "ranks_as": "processes", "slow": ("resumed", "restarted")}


def preconditioned(fraction: float) -> GradientAllReduce:
    settings = KFACPreconditioner(0.05, 0.95, 2, 3, 0.02, fraction)
    return GradientAllReduce(preconditioner=settings, commit_every=2)


ROWS = [
    Row("averaging", ParameterAveraging(2), {"optimizer": ADAM}, normed, springs.DATA, twice=True),
    Row(
        "averaging in bfloat16",
        ParameterAveraging(2, wire_dtype="bfloat16"),
        {"optimizer": MOMENTUM},
        normed,
        springs.DATA,
        twice=True,
    ),
    Row(
        "elastic",
        EASGD,
        {"optimizer": NESTEROV},
        normed,
        springs.DATA,
        resumed=(4, 13, 20),
        killed=on_springs(),
        restarted={"optimizer": SGD},
        twice=True,
    ),
    Row(
        "elastic with momentum",
        replace(EASGD, momentum=0.8),
        {"optimizer": ADAM},
        data=springs.DATA,
        resumed=(4, 13),
    ),
    Row(
        "elastic asynchronous",
        replace(EASGD, mode="asynchronous"),
        {"optimizer": NESTEROV},
        data=springs.DATA,
        # Of seven windows an epoch the last is empty: it waits for what the others come to.
        alone=(3, 6, 7, 9),
        goes_on=(4, 14),
        killed=on_springs(),
        **NOISY,
    ),
    Row(
        "elastic hogwild",
        HOGWILD,
        DELAYS,
        data=springs.DATA,
        # What a worker saves of a commit is as of a window later.
        alone=(3, 5, 6, 9),
        goes_on=(4, 14),
        killed=on_springs(reads=True),
        restarted_learns=True,
        **NOISY,
    ),
    Row(
        "elastic hogwild each step",
        replace(HOGWILD, period=1),
        DELAYS,
        alone=(3, 5, 6, 9),
        slow=("alone",),
        **NOISY,
    ),
    Row(
        "elastic hogwild with momentum",
        replace(HOGWILD, period=3, momentum=0.5),
        DELAYS,
        alone=(3, 5, 6, 9),
        slow=("alone",),
        **NOISY,
    ),
    Row(
        "elastic round robin",
        replace(EASGD, mode="round_robin"),
        {"optimizer": NESTEROV},
        normed,
        springs.DATA,
        goes_on=(4, 14),
        killed=on_springs(),
    ),
    Row(
        "elastic round robin of three steps",
        replace(EASGD, mode="round_robin", period=3),
        {"optimizer": NESTEROV},
        normed,
        springs.DATA,
        every_rounds=None,
        resumed=(20,),
        twice=True,
    ),
    Row(
        "elastic among executors",
        replace(EASGD, aggregation="executors"),
        {"optimizer": NESTEROV, "epochs": 4},
        normed,
        springs.DATA,
        "processes",
        every_rounds=None,
        resumed=(10,),
        restarted={"optimizer": SGD},
        slow=("resumed", "restarted"),
    ),
    Row(
        "outer",
        OUTER,
        {"optimizer": MOMENTUM},
        resumed=(4, 20),
        killed=with_momentum(OUTER),
        twice=True,
        restarted={"optimizer": SGD},
    ),
    Row("outer in bfloat16", replace(OUTER, wire_dtype="bfloat16"), twice=True),
    Row("outer on Adam", OUTER, {"optimizer": ADAM}, resumed=(14,)),
    Row(
        "outer of averaged states",
        replace(OUTER, inner_state="average"),
        {"optimizer": ADAM},
        resumed=(20,),
        restarted={"optimizer": MOMENTUM},
        slow=("restarted",),
    ),
    Row(
        "outer of states begun anew",
        replace(OUTER, inner_state="reset"),
        {"optimizer": ADAGRAD},
        resumed=(14,),
        restarted={"optimizer": MOMENTUM},
        slow=("restarted",),
    ),
    Row(
        "outer of two fragments",
        STREAMS[0],
        {"optimizer": MOMENTUM, **SCHEDULE},
        resumed=(4, 16),
        killed=in_fragments(STREAMS[0]),
        slow=("killed",),
    ),
    Row(
        "outer under way",
        STREAMS[2],
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(4, 13, 20),
        killed=in_fragments(STREAMS[2]),
        restarted={"optimizer": SGD},
        slow=("killed",),
    ),
    Row("outer merged", STREAMS[4], {"optimizer": ADAM, **SCHEDULE}, resumed=(13,)),
    Row("outer of fragments under way", STREAMS[5], killed=in_fragments(STREAMS[5])),
    Row(
        "outer of fragments long under way",
        STREAMS[6],
        {"optimizer": MOMENTUM, **SCHEDULE},
        resumed=(9, 16, 27),
        restarted={"optimizer": SGD},
        twice=True,
        killed_after=7,
        slow=("restarted",),
    ),
    Row(
        "outer of rounded fragments",
        ROUNDED,
        {"optimizer": MOMENTUM, **SCHEDULE},
        resumed=(20,),
        killed_learns=True,
        twice=True,
        slow=("killed_learns",),
    ),
    Row("cut off", CUT_OFF, goes_on=(14,), killed=followed(lambda: ByHand(DATA)), slow=("killed",)),
    Row("cut off as predicted", PREDICTED, goes_on=(14,), killed=followed(lambda: ByHand(DATA))),
    Row(
        "outer cut off",
        OUTER_CUT_OFF,
        goes_on=(4,),
        killed=followed(lambda: HeavyBall(DATA, rate=0.7, momentum=0.5)),
        slow=("killed",),
    ),
    Row(
        "outer cut off as predicted",
        replace(OUTER_CUT_OFF, cutoff="predicted"),
        goes_on=(20,),
        killed=followed(lambda: HeavyBall(DATA, rate=0.7, momentum=0.5)),
        slow=("killed",),
    ),
    Row("asynchronous", replace(ASYNCHRONOUS, barrier=ASP()), goes_on=(4, 14)),
    Row("asynchronous SSP 0", replace(ASYNCHRONOUS, barrier=SSP(0)), goes_on=(4,)),
    Row(
        "asynchronous SSP 1",
        replace(ASYNCHRONOUS, barrier=SSP(1)),
        killed=followed(lambda: ByHand(DATA, 0.8)),
    ),
    Row("asynchronous PBSP", replace(ASYNCHRONOUS, barrier=PBSP(1)), goes_on=(14,)),
    Row("asynchronous BSP", replace(ASYNCHRONOUS, barrier=BSP()), resumed=(14,), twice=True),
    Row(
        "delayed Nesterov",
        DELAYED,
        {"optimizer": MOMENTUM},
        alone=(2, 5, 8),  # also where momentum is due between two checkpoints
        killed=followed(lambda: Delayed(DATA, 3, 0.7, 0.5)),
    ),
    Row(
        "threshold",
        SHARED,
        resumed=(4, 14, 25),
        killed=followed(lambda: SharedByHand(DATA)),
        restarted={},
        twice=True,
        slow=("restarted",),
    ),
    Row(
        "threshold among executors",
        SHARED_AMONG,
        ranks_as="processes",
        resumed=(7,),
        restarted={},
        twice=True,
        slow=("resumed", "restarted", "twice"),
    ),
    Row(
        "threshold among executors with commits",
        replace(SHARED_AMONG, commit_every=3),
        ranks_as="processes",
        resumed=(7,),
        restarted={},
    ),
    Row(
        "1-bit Adam",
        GradientAllReduce(compression=OneBitAdam(12), commit_every=4),
        {
            "optimizer": partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9)),
            "epochs": 4,
            **SCHEDULE,
        },
        resumed=(4, 12),  # in the warm-up, and after it
        alone=(2, 6),
        restarted={},
        killed_after=25,
        **OF_TWO | {"slow": ("resumed", "alone", "restarted")},
    ),
    Row(
        "PowerSGD",
        GradientAllReduce(compression=LOW_RANK, commit_every=4),
        {"optimizer": MOMENTUM},
        resumed=(2, 10),
        alone=(1, 5),
        restarted={},
        killed_after=17,  # the last copy that the driver has is of step 16
        **OF_TWO | {"slow": ("resumed", "alone", "restarted")},
    ),
    Row(
        "PowerSGD of many buckets",
        GradientAllReduce(0.0001, compression=LOW_RANK, commit_every=6),
        {"optimizer": MOMENTUM},
        restarted={},
        killed_after=17,
        **OF_TWO,
    ),
    Row(
        "top-k",
        GradientAllReduce(compression=TopK(0.1, start_after=2), commit_every=6),
        {"optimizer": MOMENTUM},
        resumed=(2, 8),
        alone=(1, 4),
        restarted={},
        killed_after=17,
        **OF_TWO | {"slow": ("resumed", "alone", "restarted")},
    ),
    *(
        Row(
            f"K-FAC {name}",
            preconditioned(fraction),
            {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "epochs": 2},
            data=classification([14, 9]),
            ranks_as="processes",
            resumed=(4,),
            restarted={},
            killed_after=4,  # of 3 steps an epoch; the last copy that the driver has is of step 4
            slow=("restarted",),
        )
        for name, fraction in (("COMM-OPT", 1.0), ("MEM-OPT", 0.5))
    ),
    *(
        Row(
            f"AdaScale {name}",
            AdaScale(bucket_mb, commit_every=2),
            {
                "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
                # Each step starts from the rate before, so one that is left out would show.
                "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
                "scheduler_every": "step",
            },
            data=classification([22, 14]),
            ranks_as="processes",
            resumed=(9,),
            restarted={} if bucket_mb == 25 else None,
            killed_after=7,
            slow=("restarted",) if bucket_mb == 25 else ("resumed",),
        )
        # DistributedDataParallel puts the parameters into these after a step in another order.
        for name, bucket_mb in (("one bucket", 25.0), ("buckets", 0.0001))
    ),
    # Checkpoints come with commits, of which there is one an epoch.
    Row(
        "gossip",
        GossipAveraging(topology="ring"),
        every_rounds=None,
        goes_on=(3,),
        killed_learns=True,
    ),
    Row(
        "gossip without visits",
        GossipAveraging(period=100),
        {"optimizer": MOMENTUM},
        every_rounds=None,
        resumed=(6,),
    ),
    *(
        Row(
            f"gossip in step, {topology}",
            replace(RING, topology=topology),
            {"optimizer": MOMENTUM, "epochs": 4},
            data=classification([40, 33, 21, 16]),
            resumed=(8,),
            killed_learns=topology == "ring",
            twice=True,
            slow=("killed_learns",),
        )
        for topology in ("ring", "random")
    ),
    Row(
        "outer momentum of one's own",
        OWN_MOMENTUM,
        resumed=(14,),
        killed=with_momentum(OWN_MOMENTUM),
    ),
    Row(
        "asynchronous of one's own",
        OWN_ASYNCHRONOUS,
        alone=(7,),
        killed=followed(lambda: ByHand(DATA, 0.8, scale_by_staleness=True)),
    ),
    Row(
        "state of one's own",
        own_drifting.Drifting(),
        data=classification([22, 14, 5]),
        resumed=(3, 12, 20),
        restarted={},
        killed_after=6,
    ),
]
