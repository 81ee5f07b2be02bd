"""Springs whose center is kept by the workers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from toys import mlp

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run


class Unhurried:
    """A group of one worker, whose sums are there when they are waited for."""

    index, members, deadline_s = 0, (0,), 30.0

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        self.seen.append("begun")
        return lambda: self.seen.append("awaited")

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value]

    def commit(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.seen.append("handed over")


def test_among_executors_a_sum_is_awaited_when_the_next_round_begins() -> None:
    group: Any = Unhurried()
    replica = Replica(mlp(), partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    run = Run(0, replica, group, rows=5, collective=group)
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    strategy = ElasticAveraging(2, aggregation="executors")
    steps = (Batch((row[0],), row[1], last=step == 4) for step in range(5))
    strategy.train_epoch(run, strategy.start(run), steps)
    assert group.seen == ["begun", "awaited"] * 3 + ["handed over"]
