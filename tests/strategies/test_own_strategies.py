"""Strategies of one's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import own_outer_momentum
import pytest
from own_drifting import Drift, Drifting
from torch import nn
from toys import classification, make_job, mlp

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import WorkerError
from sparkdl.strategies import ParameterAveraging, Run
from sparkdl.testing import run_world
from sparkdl.worker import Job


def _text(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def test_the_example_of_the_documentation_is_the_one_that_is_tested_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing-a-strategy.md").read_text()
    section = page.split("## An example: an outer optimizer with momentum\n")[1].split("\n## ")[0]
    example = section.split("```python\n")[1].split("```")[0]
    assert _text(own_outer_momentum).endswith(example)


cloudpickle.register_pickle_by_value(sys.modules[__name__])

DATA = classification([22, 14, 5])


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    return make_job(model or mlp(), **{"strategy": Drifting(), "epochs": 3, **changes})


class Unsaveable(Drifting):
    def saved_state(self, state: Drift) -> Mapping[str, Any]:
        return {"steps": {state.steps}}


def test_what_only_pickle_could_save_is_refused_in_words(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path))
    with pytest.raises(WorkerError, match="the strategy keeps state that cannot be saved without"):
        run_world(job(strategy=Unsaveable()), DATA.shards(), checkpoints=policy)


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
