"""Strategies whose workers exchange gradients or values among themselves in every step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from strategy_row import SCHEDULE, TWO, Row, noisy
from toys import classification
from trainings import ADAM, MOMENTUM, SHARED, normed

from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import (
    AdaScale,
    ColorTrees,
    GossipAveraging,
    GradientAllReduce,
    Hybrid,
    KFACPreconditioner,
    OneBitAdam,
    ParameterAveraging,
    PowerSGD,
    TopK,
)

PAIR = classification([40, 33])
LOW_RANK = PowerSGD(1, start_after=3, min_compression_rate=0)
SHARED_AMONG = replace(SHARED, aggregation="executors")
RING = GossipAveraging(1, "symmetric", "ring")
TOGETHER: dict[str, Any] = {"data": TWO, "ranks_as": "processes", "restarted": {}, "net": noisy}
OF_TWO: dict[str, Any] = {
    "data": PAIR,
    "ranks_as": "processes",
    "nightly": ("resumed", "restarted"),
}


class EightBit(torch.optim.SGD):
    """Keeps 2 MiB of whole numbers, which decide how far each step goes."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            codes = state.setdefault("codes", torch.zeros(1 << 19, dtype=torch.uint8))
            codes += 1
            parameter.grad.mul_(codes[-1] / 100)
        super().step(closure)


def preconditioned(fraction: float) -> GradientAllReduce:
    settings = KFACPreconditioner(0.05, 0.95, 2, 3, 0.02, fraction)
    return GradientAllReduce(preconditioner=settings, commit_every=2)


ROWS = [
    Row(
        "all-reduce",
        GradientAllReduce(bucket_mb=0.0001, commit_every=3),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(5,),
        killed_after=10,
        backward=True,
        repeats=2,
        **TOGETHER,
    ),
    Row(
        "all-reduce with a commit an epoch",
        GradientAllReduce(),
        {"optimizer": MOMENTUM, **SCHEDULE, "scheduler_every": "epoch"},
        resumed=(3,),
        twice=True,
        killed_after=10,
        repeats=5,
        nightly=("resumed", "restarted"),
        **TOGETHER,
    ),
    Row(
        "all-reduce of accumulated gradients",
        GradientAllReduce(accumulate=2, commit_every=1),
        {"optimizer": partial(EightBit, lr=0.5), **SCHEDULE},
        resumed=(5,),
        killed_after=9,
        repeats=2,
        nightly=("resumed", "restarted"),
        **TOGETHER,
    ),
    Row(
        "all-reduce of rows exchanged again and again",
        GradientAllReduce(commit_every=2),
        {"optimizer": ADAM, "feed": FeedOptions(reshuffle_every=1)},
        resumed=(9,),  # in the middle of the second epoch
        killed_after=5,
        nightly=("restarted",),
        **TOGETHER | {"data": classification([22, 6])},
    ),
    Row(
        "averaging among executors",
        ParameterAveraging(2, aggregation="executors", commit_every=3),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(5,),
        killed_after=11,
        backward=True,
        repeats=2,
        nightly=("resumed", "restarted"),
        **TOGETHER,
    ),
    Row(
        "threshold among executors",
        replace(SHARED_AMONG, commit_every=3),
        ranks_as="processes",
        resumed=(7,),
        restarted={},
        twice=True,
        nightly=("twice",),
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
        **OF_TWO | {"nightly": ("resumed", "alone", "restarted")},
    ),
    Row(
        "PowerSGD",
        GradientAllReduce(compression=LOW_RANK, commit_every=4),
        {"optimizer": MOMENTUM},
        resumed=(2, 10),
        alone=(1, 5),
        restarted={},
        killed_after=17,  # the last copy that the driver has is of step 16
        **OF_TWO | {"nightly": ("resumed", "alone", "restarted")},
    ),
    Row(
        "top-k",
        GradientAllReduce(compression=TopK(0.1, start_after=2), commit_every=6),
        {"optimizer": MOMENTUM},
        resumed=(2, 8),
        alone=(1, 4),
        restarted={},
        killed_after=17,
        **OF_TWO | {"nightly": ("resumed", "alone", "restarted")},
    ),
    Row(
        "sharded parameters",
        GradientAllReduce(0.0001, commit_every=4, shard_parameters=True),
        {"optimizer": ADAM, **SCHEDULE},
        partial(normed, dropout=0.3),
        resumed=(2, 10),
        alone=(1, 5),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO
        | {"data": classification([40, 34]), "nightly": ("resumed", "alone", "restarted", "twice")},
    ),
    Row(
        "hybrid layers",
        GradientAllReduce(hybrid=Hybrid("*", 1), commit_every=4),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(2, 10),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO | {"nightly": ("resumed", "restarted", "twice")},
    ),
    Row(
        "all-reduce along trees",
        GradientAllReduce(commit_every=4, reduction=ColorTrees(2, 0.05)),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(2, 10),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO | {"nightly": ("resumed", "restarted", "twice")},
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
            nightly=("restarted",) if fraction == 1 else ("resumed", "restarted"),
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
            nightly=("restarted",) if bucket_mb == 25 else ("resumed",),
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
        killed_counts=True,
    ),
    Row(
        "gossip without visits",
        GossipAveraging(period=100),
        {"optimizer": MOMENTUM},
        every_rounds=None,
        resumed=(6,),
        nightly=("resumed",),
    ),
    *(
        Row(
            f"gossip in step, {topology}",
            replace(RING, topology=topology),
            {"optimizer": MOMENTUM, "epochs": 4},
            data=classification([40, 33, 21, 16]),
            resumed=(8,),
            killed_counts=topology == "ring",
            twice=True,
            nightly=("killed_counts",) if topology == "ring" else ("resumed", "twice"),
        )
        for topology in ("ring", "random")
    ),
]
