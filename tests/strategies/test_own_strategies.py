"""A strategy is one short file: two of them, killed, resumed and simulated.

Nothing else in the tests or in ``sparkdl`` knows of them.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import own_asynchronous
import own_outer_momentum
import pytest
import torch
from interruptions import same_bits
from misbehaving import resume_after
from oracles import Simulated, mean, momentum, scaled
from own_asynchronous import EachForItself
from own_outer_momentum import OuterMomentum
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error, sgd_on_union

from sparkdl.testing import run_world
from sparkdl.worker import Job

for module in (misbehaving, own_asynchronous, own_outer_momentum):
    cloudpickle.register_pickle_by_value(module)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
SYNCHRONOUS = OuterMomentum(period=2, momentum=0.6, rate=0.7)


def job(strategy: Any, model: nn.Module | None = None) -> Job:
    return make_job(model or mlp(), strategy=strategy, epochs=3, max_failures=1)


class Momentum:
    """The oracle of the outer momentum, in float64 numpy."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean_of_all: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - c for new, c in zip(mean_of_all, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + change for v, change in zip(before, changes, strict=True)]
        return [torch.from_numpy(c + 0.7 * v) for c, v in zip(old, self.velocity, strict=True)]


@pytest.mark.parametrize("module", [own_outer_momentum, own_asynchronous], ids=lambda m: m.__name__)
class TestTheFile:
    def test_has_less_than_a_hundred_lines(self, module: ModuleType) -> None:
        assert len(_text(module).splitlines()) < 100

    def test_imports_nothing_of_sparkdl_but_strategies_and_protocols(
        self, module: ModuleType
    ) -> None:
        nodes = list(ast.walk(ast.parse(_text(module))))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        ours = {name for name in names if name and name.startswith("sparkdl")}
        assert ours == {"sparkdl.strategies", "sparkdl.protocols"}


def _text(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def test_the_example_of_the_documentation_is_the_one_that_is_tested_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing-a-strategy.md").read_text()
    section = page.split("## An example: an outer optimizer with momentum\n")[1].split("\n## ")[0]
    example = section.split("```python\n")[1].split("```")[0]
    assert _text(own_outer_momentum).endswith(example)


def test_with_outer_momentum_a_resumed_training_ends_in_the_same_bits_which_are_the_oracle_s(
    tmp_path: Path,
) -> None:
    with recorded_commits() as commits:
        whole = run_world(job(SYNCHRONOUS), DATA.shards())
    oracle = replay(job(SYNCHRONOUS), DATA.shards(), commits, Momentum().move)
    assert relative_difference(whole.module, oracle) < 1e-12
    assert same_bits(resume_after(14, job(SYNCHRONOUS), DATA.shards(), tmp_path), whole)


def test_asynchronously_a_resumed_training_of_one_worker_is_plain_sgd(tmp_path: Path) -> None:
    data, alone = classification([41]), job(EachForItself(period=2))
    outcome = resume_after(7, alone, data.shards(), tmp_path)
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "simulated",
    [
        Simulated(OuterMomentum(1, 0.5, 0.7), partial(momentum, mean, nesterov=False)),
        Simulated(EachForItself(1, 0.8), partial(scaled, 0.8, by_staleness=True)),
    ],
    ids=["outer momentum", "asynchronous"],
)
@pytest.mark.slow_variants
def test_every_schedule_ends_with_the_center_that_its_commits_give(simulated: Simulated) -> None:
    ended = [simulated.run(seed) for seed in range(1000)]
    assert sum(outcome.failure is None for outcome in ended) > 500
    assert sum(outcome.losses for outcome in ended) > 200
