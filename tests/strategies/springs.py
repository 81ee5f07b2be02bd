"""What tests of elastic averaging train, and see of it when all is over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import trainings

from sparkdl.strategies import ElasticAveraging, Run

STRATEGY = ElasticAveraging(period=2, moving_rate=0.2)


job = partial(trainings.job, strategy=STRATEGY)


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
