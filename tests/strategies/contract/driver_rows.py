"""Strategies whose values pass through the driver, and those like them among executors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from by_hand import Delayed, MeanChange, Shared
from strategy_row import (
    SCHEDULE,
    TWO,
    Row,
    averaged,
    followed,
    in_fragments,
    noisy,
    on_springs,
    with_momentum,
)
from streams import ROUNDED, STREAMS
from toys import classification
from trainings import (
    ADAGRAD,
    ADAM,
    DATA,
    EVEN,
    MOMENTUM,
    SGD,
    SHARED,
    STRATEGY,
    normed,
    on_backbone,
)

from sparkdl.feed.feed import FeedOptions
from sparkdl.large_batches import LAMB
from sparkdl.strategies import (
    ASP,
    BSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    ElasticAveraging,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
)

NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
EASGD = ElasticAveraging(period=2, moving_rate=0.2)
HOGWILD = replace(EASGD, mode="hogwild")
OUTER = STRATEGY
CUT_OFF = ParameterAveraging(2, average_optimizer_state=False, cutoff=1)
PREDICTED = ParameterAveraging(2, cutoff="predicted")
OUTER_CUT_OFF = OuterOptimizer(2, OuterSGD(0.7, 0.5, nesterov=False), cutoff=1)
ASYNCHRONOUS = AsynchronousSGD(period=2, rate=0.8)
DELAYED = AsynchronousOuterOptimizer(DelayedNesterov(3, 0.7, 0.5), period=2)
FEW = classification([22, 14, 5])
"""Of batches of 4: 6, 4 and 2 steps an epoch."""
ONE_CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=25)
NOISY = {"model": partial(normed, dropout=0.3)}
DELAYS = {"optimizer": partial(torch.optim.SGD, lr=0.05), **SCHEDULE}

ROWS = [
    Row(
        "averaging",
        ParameterAveraging(2),
        {"optimizer": ADAM},
        normed,
        EVEN,
        every_rounds=None,
        resumed=(14,),
        stopped=(14,),
        killed=averaged(EVEN),
        twice=True,
        nightly=("killed",),
    ),
    Row(
        "averaging in bfloat16",
        ParameterAveraging(2, wire_dtype="bfloat16"),
        {"optimizer": MOMENTUM},
        normed,
        EVEN,
        every_rounds=None,
        resumed=(14,),
        stopped=(14,),
        twice=True,
        nightly=("resumed", "twice"),
    ),
    Row(
        "averaging of kept states in bfloat16",
        ParameterAveraging(2, average_optimizer_state=False, wire_dtype="bfloat16"),
        {"optimizer": partial(LAMB, lr=0.02, weight_decay=1e-2)},
        data=FEW,
        every_rounds=None,
        resumed=(8,),
        stopped=(8,),
        nightly=("resumed",),
    ),
    *(
        Row(
            f"averaging on one cycle by {unit}",
            ParameterAveraging(1),
            {"optimizer": MOMENTUM, "epochs": 4, "scheduler": ONE_CYCLE, "scheduler_every": unit},
            data=FEW,
            every_rounds=None,
            # Where an epoch ended, workers with fewer rows stand some steps behind the others.
            resumed=(26,),
            stopped=(20,),
            killed=averaged(FEW),
            killed_after=0,
            nightly=("killed",) if unit == "step" else ("killed", "resumed"),
        )
        for unit in ("step", "epoch")
    ),
    *(
        Row(
            f"averaging of rows exchanged {name}",
            ParameterAveraging(1),
            {"feed": feed},
            on_backbone,
            FEW,
            every_rounds=None,
            resumed=(14,),
            stopped=(14,),
            restarted=restarted,
            killed_after=6,
            nightly=("restarted",) if feed.reshuffle_every else ("restarted", "resumed"),
        )
        for name, feed, restarted in (
            ("again and again", FeedOptions(reshuffle_every=1), {"optimizer": ADAM}),
            ("once", FeedOptions(exchange_rows=True), None),
            ("and not kept", FeedOptions(exchange_rows=True, keep_exchanged=False), {}),
        )
    ),
    Row(
        "averaging of what draws random numbers",
        ParameterAveraging(2),
        {"optimizer": ADAM},
        noisy,
        TWO,
        "processes",
        every_rounds=None,
        resumed=(10,),
        stopped=(10,),
        restarted={},
        killed_after=13,
        net=noisy,
        nightly=("resumed", "restarted"),
    ),
    Row(
        "elastic",
        EASGD,
        {"optimizer": NESTEROV},
        normed,
        EVEN,
        resumed=(4, 13, 20),
        killed=on_springs(),
        restarted={"optimizer": SGD},
        twice=True,
        nightly=("restarted",),
    ),
    Row(
        "elastic with momentum",
        replace(EASGD, momentum=0.8),
        {"optimizer": ADAM},
        data=EVEN,
        resumed=(4, 13),
        nightly=("resumed",),
    ),
    Row(
        "elastic asynchronous",
        replace(EASGD, mode="asynchronous"),
        {"optimizer": NESTEROV},
        data=EVEN,
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
        data=EVEN,
        # What a worker saves of a commit is as of a window later.
        alone=(3, 5, 6, 9),
        goes_on=(4, 14),
        killed=on_springs(reads=True),
        restarted_counts=True,
        **NOISY,
        nightly=("killed",),
    ),
    Row(
        "elastic round robin",
        replace(EASGD, mode="round_robin"),
        {"optimizer": NESTEROV},
        normed,
        EVEN,
        goes_on=(4, 14),
        killed=on_springs(),
        nightly=("killed",),
    ),
    Row(
        "elastic among executors",
        replace(EASGD, aggregation="executors"),
        {"optimizer": NESTEROV, "epochs": 4},
        normed,
        EVEN,
        "processes",
        every_rounds=None,
        resumed=(10,),
        restarted={"optimizer": SGD},
        nightly=("resumed", "restarted"),
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
    Row(
        "outer of averaged states",
        replace(OUTER, inner_state="average"),
        {"optimizer": ADAM},
        resumed=(20,),
        restarted={"optimizer": MOMENTUM},
        nightly=("restarted", "resumed"),
    ),
    Row(
        "outer of states begun anew",
        replace(OUTER, inner_state="reset"),
        {"optimizer": ADAGRAD},
        resumed=(14,),
        restarted={"optimizer": MOMENTUM},
        nightly=("restarted", "resumed"),
    ),
    Row(
        "outer under way",
        STREAMS[2],
        {"optimizer": ADAM, **SCHEDULE},
        resumed=(4, 13, 20),
        killed=in_fragments(STREAMS[2]),
        restarted={"optimizer": SGD},
        nightly=("killed", "restarted"),
    ),
    Row("outer of fragments under way", STREAMS[5], killed=in_fragments(STREAMS[5])),
    Row(
        "outer of fragments long under way",
        STREAMS[6],
        {"optimizer": MOMENTUM, **SCHEDULE},
        resumed=(9, 16, 27),
        restarted={"optimizer": SGD},
        twice=True,
        killed_after=7,
        nightly=("restarted", "resumed", "twice"),
    ),
    Row(
        "outer of rounded fragments",
        ROUNDED,
        {"optimizer": MOMENTUM, **SCHEDULE},
        resumed=(20,),
        killed_counts=True,
        twice=True,
        nightly=("killed_counts", "resumed", "twice"),
    ),
    Row(
        "cut off",
        CUT_OFF,
        goes_on=(14,),
        killed=followed(lambda: MeanChange(DATA)),
        nightly=("killed",),
    ),
    Row(
        "cut off as predicted",
        PREDICTED,
        goes_on=(14,),
        killed=followed(lambda: MeanChange(DATA)),
        nightly=("goes_on",),
    ),
    Row("outer cut off", OUTER_CUT_OFF, goes_on=(4,)),
    Row("asynchronous", replace(ASYNCHRONOUS, barrier=ASP()), goes_on=(4, 14)),
    Row(
        "asynchronous SSP 1",
        replace(ASYNCHRONOUS, barrier=SSP(1)),
        killed=followed(lambda: MeanChange(DATA, 0.8)),
    ),
    Row(
        "asynchronous BSP",
        replace(ASYNCHRONOUS, barrier=BSP()),
        resumed=(14,),
        twice=True,
        nightly=("resumed", "twice"),
    ),
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
        killed=followed(lambda: Shared(DATA, SHARED)),
        restarted={},
        twice=True,
        nightly=("restarted",),
    ),
]
