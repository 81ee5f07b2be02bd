"""What a strategy keeps on a worker: started, saved, given back, and cleaned up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import pytest
import torch
from interruptions import same_bits
from misbehaving import KillsOnce, kill_once, resume_after
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.averager.values.wire_format import FullPrecision, WireFormat
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Batch
from sparkdl.strategies import Needs, ParameterAveraging, Run, Strategy
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DATA = classification([22, 14, 5])


@dataclass
class Drift:
    """Where the parameters of one worker drift to, and since how many steps."""

    direction: Tensor
    steps: int = 0


@dataclass(frozen=True)
class Drifting(Strategy[Drift]):
    """Averages after each step, and pushes each worker by what it has seen before."""

    @property
    def wire_format(self) -> WireFormat:
        return FullPrecision()

    @property
    def needs(self) -> Needs:
        return Needs(exchanges_optimizer_state=True)

    def start(self, run: Run) -> Drift:
        return Drift(torch.zeros_like(self._segments(run)[0]))

    def saved_state(self, state: Drift) -> Mapping[str, Any]:
        return {"direction": state.direction, "steps": state.steps}

    def restore_state(self, state: Drift, saved: Mapping[str, Any]) -> None:
        state.direction.copy_(saved["direction"])
        state.steps = saved["steps"]

    def after_step(self, run: Run, state: Drift, batch: Batch) -> None:
        parameters = self._segments(run)[0]
        state.steps += 1
        state.direction.mul_(0.9).add_(parameters, alpha=0.01 / state.steps)
        parameters.add_(state.direction)
        if not batch.last:
            run.averager.exchange(self._segments(run), run.close_window(last=False))

    def end_epoch(self, run: Run, state: Drift) -> None:
        run.averager.exchange(self._segments(run), run.close_window(last=True))

    def _segments(self, run: Run) -> list[Tensor]:
        return run.replica.segments(with_optimizer=True)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    return make_job(model or mlp(), **{"strategy": Drifting(), "epochs": 3, **changes})


@pytest.mark.parametrize("windows", [3, 12, 20])
def test_it_is_in_a_checkpoint(tmp_path: Path, windows: int) -> None:
    whole = run_world(job(), DATA.shards())
    assert same_bits(resume_after(windows, job(), DATA.shards(), tmp_path), whole)


def test_it_is_kept_for_when_all_workers_start_again(tmp_path: Path) -> None:
    options = FeedOptions(reshuffle_every=1)
    whole = run_world(job(feed=options), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=6), feed=options, max_failures=1)
    outcome = kill_once(killed, DATA.shards())
    assert same_bits(outcome, whole)


class Unsaveable(Drifting):
    def saved_state(self, state: Drift) -> Mapping[str, Any]:
        return {"steps": {state.steps}}


def test_what_only_pickle_could_save_is_refused_in_words(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path))
    with pytest.raises(WorkerError, match="the strategy keeps state that cannot be saved without"):
        run_world(job(strategy=Unsaveable()), DATA.shards(), checkpoints=policy)


@pytest.mark.parametrize("without", [{}, {"gang_start": True}, {"resumes_alone": False}])
def test_workers_that_need_each_other_cannot_do_without(without: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match="set gang_start=True and resumes_alone=False"):
        Needs(exchanges_optimizer_state=True, collective=True, **without)


EVENTS: list[tuple[str, int]] = []


class StartsHalfway(ParameterAveraging):
    """On rank 1 what it has begun with has to be cleaned up although the rest fails."""

    def start(self, run: Run) -> Any:
        EVENTS.append(("open", run.rank))
        run.cleanup.callback(EVENTS.append, ("closed", run.rank))
        if run.rank == 1:
            raise ZeroDivisionError("half-way")
        return super().start(run)


def test_a_start_that_fails_half_way_is_cleaned_up() -> None:
    EVENTS.clear()
    with pytest.raises(WorkerError, match="half-way"):
        run_world(job(strategy=StartsHalfway()), DATA.shards())
    assert sorted(EVENTS) == sorted(
        (what, rank) for rank in range(3) for what in ("open", "closed")
    )
