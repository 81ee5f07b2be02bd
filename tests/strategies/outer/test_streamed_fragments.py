"""Rounds of fragments, under way while workers train, against plain torch and through losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from every_row import every
from streams import OUTER, STREAMS, ByHand, vector_of
from torch import Tensor, nn
from toys import mlp, relative_error
from trainings import ADAM, DATA, MOMENTUM, SGD, SIZES, job

from sparkdl.errors import WorkerError
from sparkdl.events import WindowReport
from sparkdl.strategies import OuterOptimizer
from sparkdl.testing import run_world


@pytest.mark.nightly_variants(every=2)
@every("inner", [SGD, MOMENTUM, ADAM])
@every("strategy", STREAMS)
def test_it_is_the_algorithm_by_hand_on_unequal_shards(
    strategy: OuterOptimizer, inner: Any
) -> None:
    outcome = run_world(job(strategy=strategy, optimizer=inner), DATA.shards())
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert relative_error(outcome.module, ByHand(strategy, inner).train(3)) < 1e-8


def test_each_setting_gives_another_model() -> None:
    """Else the oracle above would show nothing."""
    ends = [ByHand(strategy, SGD).train(2) for strategy in [OuterOptimizer(4, OUTER), *STREAMS]]
    for first, second in pairwise([*ends, ends[0]]):
        assert relative_error(first, second) > 1e-4


# Limits


@every(("wire_dtype", "off"), [("bfloat16", 64), ("float8", 8), ("float4", 2)])
def test_rounded_changes_end_close_to_float32(wire_dtype: Any, off: float) -> None:
    strategy = OuterOptimizer(4, OUTER, fragments=2, overlap=1, merge=0.5)
    exact, rounded = (
        vector_of(run_world(job(strategy=each), DATA.shards()).module)
        for each in (strategy, dataclasses.replace(strategy, wire_dtype=wire_dtype))
    )
    moved = (exact - vector_of(mlp())).norm()
    assert 0 < float((rounded - exact).norm()) < float(moved) / off


# Rounds


def rounds_of(strategy: OuterOptimizer) -> Iterator[WindowReport]:
    events: list[object] = []
    run_world(job(strategy=strategy, epochs=1), DATA.shards(), on_event=events.append)
    return (event for event in events if isinstance(event, WindowReport))


@every(
    ("strategy", "steps"),
    [
        (
            OuterOptimizer(4, fragments=2),
            {0: [2, 4, 6, 8, 10, 10], 1: [2, 4, 6, 8, 9, 9], 2: [2, 4, 6, 6]},
        ),
        (
            OuterOptimizer(8, fragments=3, overlap=1),
            {0: [3, 6, 8, 10, 10, 10], 1: [3, 6, 8, 9, 9, 9], 2: [3, 6, 6, 6]},
        ),
        (OuterOptimizer(3, overlap=2), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
    ],
)
def test_each_worker_sends_fragments_in_turn_and_all_of_them_at_the_end(
    strategy: OuterOptimizer, steps: dict[int, list[int]]
) -> None:
    windows = list(rounds_of(strategy))
    seen = {rank: [w.step_of_epoch for w in windows if w.rank == rank] for rank in range(3)}
    assert seen == steps
    assert sum(window.examples for window in windows) == sum(SIZES)


def test_an_error_in_training_while_a_round_is_under_way_ends_the_run(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, features: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                raise ValueError("no more")
            outputs: Tensor = self.net(features)
            return outputs

    strategy = OuterOptimizer(3, overlap=2)
    with pytest.raises(WorkerError, match="no more"):
        run_world(job(Fails(), strategy=strategy), DATA.shards())


# Losses and checkpoints


# Arguments
