"""Strategies whose workers exchange gradients or values among themselves in every step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from strategy_row import SCHEDULE, Row
from thresholds import AMONG as SHARED_AMONG
from toys import classification
from trainings import ADAM, MOMENTUM, normed

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

TWO = classification([40, 33])
LOW_RANK = PowerSGD(1, start_after=3, min_compression_rate=0)
RING = GossipAveraging(1, "symmetric", "ring")
OF_TWO: dict[str, Any] = {"data": TWO, "ranks_as": "processes", "slow": ("resumed", "restarted")}


def preconditioned(fraction: float) -> GradientAllReduce:
    settings = KFACPreconditioner(0.05, 0.95, 2, 3, 0.02, fraction)
    return GradientAllReduce(preconditioner=settings, commit_every=2)


ROWS = [
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
        | {
            "data": classification([40, 34]),
            "slow": ("resumed", "alone", "restarted", "twice"),
        },
    ),
    Row(
        "sharded parameters with momentum",
        GradientAllReduce(commit_every=4, shard_parameters=True),
        {"optimizer": MOMENTUM},
        resumed=(5,),
        restarted={},
        killed_after=17,
        **OF_TWO,
    ),
    Row(
        "hybrid layers",
        GradientAllReduce(hybrid=Hybrid("*", 1), commit_every=4),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(2, 10),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO | {"slow": ("resumed", "restarted", "twice")},
    ),
    Row(
        "all-reduce along trees",
        GradientAllReduce(commit_every=4, reduction=ColorTrees(2, 0.05)),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(2, 10),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO | {"slow": ("resumed", "restarted", "twice")},
    ),
    Row(
        "averaging along trees",
        ParameterAveraging(2, aggregation="executors", reduction=ColorTrees(2, 0.05)),
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(2,),
        restarted={},
        twice=True,
        killed_after=17,
        **OF_TWO | {"slow": ("resumed", "restarted", "twice")},
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
]
