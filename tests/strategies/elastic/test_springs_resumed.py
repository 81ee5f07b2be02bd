"""Springs whose center the workers keep, in a training that goes on from a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from interruptions import same_bits
from misbehaving import Interrupted
from springs import DATA, job
from torch import nn

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import ElasticAveraging
from sparkdl.testing import run_world

AMONG = ElasticAveraging(period=2, moving_rate=0.2, aggregation="executors")
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.slow
def test_among_executors_it_resumes_in_the_same_bits(tmp_path: Path) -> None:
    """Each replica where it was, with its momentum, and with what it has still to give up."""

    def die_in_the_third_epoch(event: object) -> None:
        if isinstance(event, EpochSummary) and event.epoch == 3:
            raise Interrupted

    given = job(normed(), optimizer=MOMENTUM, strategy=AMONG, epochs=4)
    whole = run_world(given, DATA.shards(), ranks_as="processes")
    policy = CheckpointPolicy(path=str(tmp_path / "c"))
    world = partial(run_world, given, DATA.shards(), ranks_as="processes", checkpoints=policy)
    with pytest.raises(Interrupted):
        world(on_event=die_in_the_third_epoch)
    resumed: list[object] = []
    again = world(on_event=resumed.append)
    trained = {event.epoch for event in resumed if isinstance(event, WindowReport)}
    assert trained in ({3, 4}, {4})
    assert same_bits(again, whole)
