"""One row a strategy: its settings, and what comes of it where a training is cut short.

A new strategy gets one row here, and all tests of this folder with it.
"""

from __future__ import annotations

import driver_rows
import own_asynchronous
import own_drifting
import own_outer_momentum
import peer_rows
from by_hand import MeanChange
from strategy_row import Row, followed, with_momentum
from toys import classification
from trainings import DATA

OWN_MOMENTUM = own_outer_momentum.OuterMomentum(period=2, momentum=0.6, rate=0.7)
OWN_ASYNCHRONOUS = own_asynchronous.EachForItself(period=2, rate=0.8)
ROWS = [
    *driver_rows.ROWS,
    *peer_rows.ROWS,
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
        killed=followed(lambda: MeanChange(DATA, 0.8, scale_by_staleness=True)),
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
