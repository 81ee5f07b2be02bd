"""Rounds of fragments, under way while workers train, against plain torch and through losses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from interruptions import same_bits
from misbehaving import KillsOnce, die_after, kill_once, resume_after
from outer import ADAM, DATA, MOMENTUM, SGD, SIZES, job, named
from recorded import recorded_decisions
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from toys import (
    _train_by_hand,
    batches_by_hand,
    classification,
    mlp,
    relative_error,
    sgd_on_union,
)

from sparkdl.averager.coordination import decisions as do
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import OuterOptimizer, OuterSGD
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(misbehaving)

OUTER = OuterSGD(0.7, 0.5)
STREAMS = [
    OuterOptimizer(4, OUTER, fragments=2),
    OuterOptimizer(6, OUTER, fragments=5),
    OuterOptimizer(4, OUTER, overlap=2, merge=0.5),
    OuterOptimizer(4, OUTER, overlap=3),
    OuterOptimizer(4, OUTER, merge=0.3),
    OuterOptimizer(6, OUTER, fragments=3, overlap=1, merge=0.5),
    OuterOptimizer(9, OUTER, fragments=2, overlap=3, merge=0.25),
    OuterOptimizer(((1, 4), (3, 6)), OUTER, fragments=2, overlap=1),
]

ROUNDED = OuterOptimizer(6, OUTER, "keep", "float4", fragments=3, overlap=1, merge=0.5)


def described(strategy: OuterOptimizer) -> str:
    values = strategy.period, strategy.fragments, strategy.overlap, strategy.merge
    return "-".join(map(str, values))


Part = slice
Sent = tuple[int, Tensor]
"""What a worker contributes to a round: rows, and all of its parameters."""


def vector_of(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


class ByHand:
    """Plain torch in one process: each worker is a generator of what it contributes."""

    def __init__(self, strategy: OuterOptimizer, inner: Any) -> None:
        self.strategy = strategy
        start = mlp().train()
        self.center = vector_of(start)
        self.velocity = torch.zeros_like(self.center)
        self.replicas = [copy.deepcopy(start) for _ in SIZES]
        self.optimizers = [inner(replica.parameters()) for replica in self.replicas]
        count, size = strategy.fragments, len(self.center)
        cuts = [size * number // count for number in range(count + 1)]
        self.parts = [Part(first, stop) for first, stop in pairwise(cuts)]
        self.number = 0
        """Rounds of the epoch until now, from which follows the fragment that is due."""

    def train(self, epochs: int) -> nn.Module:
        for epoch in range(1, epochs + 1):
            self.run_epoch({rank: self.worker(rank, epoch) for rank in range(len(SIZES))})
            for replica in self.replicas:
                vector_to_parameters(self.center.clone(), replica.parameters())
        return self.replicas[0]

    def run_epoch(self, workers: dict[int, Generator[Sent, Tensor, None]]) -> None:
        self.number = 0
        sent = {rank: next(worker) for rank, worker in workers.items()}
        while sent:
            answer = self.end_round(list(sent.values()))
            going_on = {}
            for rank in sent:
                with suppress(StopIteration):
                    going_on[rank] = workers[rank].send(answer)
            sent = going_on

    @property
    def fragment(self) -> int:
        """Which fragment the next round is of."""
        return self.number % len(self.parts)

    def end_round(self, sent: list[Sent]) -> Tensor:
        part = self.parts[self.fragment]
        self.number += 1
        weights = [self.due_rows(rows, part) for rows, _ in sent]
        if sum(weights):
            mean = np.average([values[part].numpy() for _, values in sent], 0, weights)
            change = torch.from_numpy(mean) - self.center[part]
            outer = self.strategy.outer
            assert isinstance(outer, OuterSGD)
            self.velocity[part] = outer.momentum * self.velocity[part] + change
            moved = change + outer.momentum * self.velocity[part]
            self.center[part] += outer.learning_rate * moved
        return self.center[part].clone()

    def due_rows(self, rows: Any, part: Part) -> int:
        return int(rows[self.parts.index(part)])

    def worker(self, rank: int, epoch: int, first: int = 0) -> Generator[Any, Tensor, None]:
        strategy, replica, count = self.strategy, self.replicas[rank], len(self.parts)
        period = strategy.period_in(epoch)
        plan = batches_by_hand(DATA, rank, epoch, 4)
        rows = [0] * count
        under_way: tuple[int, Part, Tensor] | None = None

        def take(part: Part, answer: Tensor, local: float) -> None:
            mine = vector_of(replica)
            mine[part] = local * mine[part] + (1 - local) * answer
            vector_to_parameters(mine, replica.parameters())

        for step, batch in enumerate(plan[first:], first + 1):
            _train_by_hand(replica, self.optimizers[rank], [batch])
            rows = [each + len(batch[1]) for each in rows]
            if under_way is not None and step == under_way[0]:
                take(under_way[1], under_way[2], strategy.merge)
                under_way = None
            # After steps ceil(period / fragments), ceil(2 * period / fragments), ...
            due = any(step == -(-k * period // count) for k in range(1, 100))
            if due and step < len(plan):
                fragment = self.fragment
                part = self.parts[fragment]
                answer = yield rows, vector_of(replica)
                rows[fragment] = 0
                under_way = step + strategy.overlap, part, answer
                if not strategy.overlap:
                    take(part, answer, strategy.merge)
                    under_way = None
        if under_way is not None:
            take(under_way[1], under_way[2], strategy.merge)
        for _ in range(count):
            fragment = self.fragment
            answer = yield rows, vector_of(replica)
            rows[fragment] = 0
            take(self.parts[fragment], answer, 0.0)


class AsDecided(ByHand):
    """What a run has committed, and nothing else; who joins begins with the center."""

    def __init__(self, strategy: OuterOptimizer, inner: Any) -> None:
        super().__init__(strategy, inner)
        self.epoch = 1
        self.workers: dict[int, Generator[Sent, Tensor, None]] = {}
        self.sent: dict[int, Sent] = {}
        self.steps = dict.fromkeys(range(len(SIZES)), 0)

    def follow(self, decisions: list[do.Decision]) -> nn.Module:
        committed: list[WindowReport] = []
        for decision in decisions:
            event = decision.event if isinstance(decision, do.Report) else None
            if isinstance(event, WindowReport):
                committed.append(event)
                continue
            if committed:
                self.commit(committed)
                committed = []
            if isinstance(event, EpochSummary):
                self.epoch, self.number = event.epoch + 1, 0
                for rank in self.steps:
                    self.begin(rank)
            if isinstance(decision, do.Welcome):
                self.begin(decision.member.rank)
        vector_to_parameters(self.center.clone(), self.replicas[0].parameters())
        return self.replicas[0]

    def begin(self, rank: int) -> None:
        vector_to_parameters(self.center.clone(), self.replicas[rank].parameters())
        self.workers[rank] = self.worker(rank, self.epoch, self.steps[rank])
        self.sent[rank] = next(self.workers[rank])

    def commit(self, windows: list[WindowReport]) -> None:
        answer = self.end_round([self.sent[window.rank] for window in windows])
        for window in windows:
            self.steps[window.rank] = 0 if window.last else window.step_of_epoch
            with suppress(StopIteration):
                self.sent[window.rank] = self.workers[window.rank].send(answer)


@pytest.mark.slow_variants(every=2)
@pytest.mark.parametrize("inner", [SGD, MOMENTUM, ADAM], ids=named)
@pytest.mark.parametrize("strategy", STREAMS, ids=described)
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


def test_with_a_merge_factor_of_nearly_nothing_it_is_diloco() -> None:
    diloco, streaming = (
        run_world(job(strategy=OuterOptimizer(4, OUTER, merge=merge)), DATA.shards()).module
        for merge in (0.0, 1e-300)
    )
    assert relative_error(streaming, diloco) < 1e-12


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_of_one_epochs_last_rounds_all_fragments_together_are_diloco(wire_dtype: Any) -> None:
    """In windows as long as an epoch every fragment is sent once, after all steps."""
    whole, parts = (
        run_world(
            job(strategy=OuterOptimizer(50, OUTER, wire_dtype=wire_dtype, fragments=fragments)),
            DATA.shards(),
        )
        for fragments in (1, 4)
    )
    assert same_bits(whole, parts)


@pytest.mark.parametrize("fragments", [1, 3])
def test_without_an_outer_optimizer_a_single_worker_trains_as_if_alone(fragments: int) -> None:
    data = classification([41])
    strategy = OuterOptimizer(6, OuterSGD(1, 0), fragments=fragments)
    outcome = run_world(job(strategy=strategy), data.shards())
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


@pytest.mark.parametrize(("wire_dtype", "off"), [("bfloat16", 64), ("float8", 8), ("float4", 2)])
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


@pytest.mark.parametrize(
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
    ids=lambda each: described(each) if isinstance(each, OuterOptimizer) else "",
)
def test_each_worker_sends_fragments_in_turn_and_all_of_them_at_the_end(
    strategy: OuterOptimizer, steps: dict[int, list[int]]
) -> None:
    windows = list(rounds_of(strategy))
    seen = {rank: [w.step_of_epoch for w in windows if w.rank == rank] for rank in range(3)}
    assert seen == steps
    assert sum(window.examples for window in windows) == sum(SIZES)


@pytest.mark.parametrize("strategy", [STREAMS[6], ROUNDED], ids=described)
def test_the_same_seed_gives_the_same_bits(strategy: OuterOptimizer) -> None:
    first, second = (run_world(job(strategy=strategy), DATA.shards()) for _ in range(2))
    assert same_bits(first, second)


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


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize(
    ("strategy", "windows", "inner"),
    [
        *((STREAMS[0], windows, MOMENTUM) for windows in (4, 16)),
        *((STREAMS[2], windows, ADAM) for windows in (4, 13, 20)),
        *((STREAMS[6], windows, MOMENTUM) for windows in (9, 16, 27)),
        (STREAMS[4], 13, ADAM),
        (ROUNDED, 20, MOMENTUM),
    ],
    ids=lambda each: described(each) if isinstance(each, OuterOptimizer) else named(each),
)
def test_resumed_it_ends_in_the_same_bits(
    tmp_path: Path, strategy: OuterOptimizer, windows: int, inner: Any
) -> None:
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97)
    given = job(strategy=strategy, optimizer=inner, scheduler=schedule, scheduler_every="step")
    whole = run_world(given, DATA.shards())
    resumed = resume_after(windows, given, DATA.shards(), tmp_path)
    assert [row.examples for row in resumed.history] == [sum(SIZES)] * 3
    assert same_bits(resumed, whole)


@pytest.mark.slow_variants
@pytest.mark.parametrize("strategy", [STREAMS[5], STREAMS[0], STREAMS[2]], ids=described)
def test_a_killed_worker_comes_back_to_the_center_that_the_commits_give(
    strategy: OuterOptimizer, tmp_path: Path
) -> None:
    killed = job(KillsOnce(tmp_path, after=12), strategy=strategy)
    with recorded_decisions() as decisions:
        outcome = kill_once(killed, DATA.shards())
    oracle = AsDecided(strategy, SGD).follow(decisions)
    assert relative_error(outcome.module.get_submodule("net"), oracle) < 1e-8
    assert relative_error(oracle, ByHand(strategy, SGD).train(3)) > 1e-6


@pytest.mark.slow
def test_a_killed_worker_comes_back_where_changes_are_rounded(tmp_path: Path) -> None:
    killed = job(KillsOnce(tmp_path, after=12), strategy=ROUNDED)
    outcome = kill_once(killed, DATA.shards())
    assert outcome.history[-1].loss < outcome.history[0].loss


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("strategy", "after"), [(STREAMS[2], 12), (STREAMS[6], 7)], ids=["overlap", "fragments"]
)
def test_when_all_start_again_each_goes_on_from_its_own_parameters(
    tmp_path: Path, strategy: OuterOptimizer, after: int
) -> None:
    """Workers that reshuffle their rows cannot be replaced one by one."""
    given = {"feed": FeedOptions(reshuffle_every=1), "strategy": strategy}
    whole = run_world(job(**given), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=after), **given)
    outcome = kill_once(killed, DATA.shards())
    assert same_bits(outcome, whole)


def test_with_other_fragments_a_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(9, job(strategy=STREAMS[0]), DATA.shards(), policy)
    other = job(strategy=dataclasses.replace(STREAMS[0], fragments=4))
    with pytest.raises(ConfigError, match=r"strategy: was OuterOptimizer\(.*fragments=2"):
        run_world(other, DATA.shards(), checkpoints=policy)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": 0}, r"fragments must be a whole number >= 1, got 0"),
        ({"fragments": 2.5}, r"fragments must be a whole number >= 1, got 2.5"),
        ({"overlap": -1}, r"overlap must be a whole number of steps >= 0, got -1"),
        ({"overlap": True}, r"overlap must be a whole number of steps >= 0, got True"),
        ({"merge": 1}, r"merge must be a number >= 0 and < 1, got 1"),
        ({"merge": "0.5"}, r"merge must be a number >= 0 and < 1, got '0.5'"),
        ({"period": 4, "overlap": 4}, r"there are 4 steps between two rounds; .* overlap=4"),
        (
            {"period": 4, "fragments": 3, "overlap": 1},
            r"there are 1 steps between two rounds; .* overlap=1",
        ),
        (
            {"period": ((1, 9), (2, 3)), "fragments": 4},
            r"there are 0 steps between two rounds; .* overlap=0",
        ),
        ({"fragments": 2, "inner_state": "reset"}, r"inner_state='reset' needs blocking rounds"),
        ({"overlap": 2, "inner_state": "average"}, r"inner_state='average' needs blocking rounds"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptimizer(**arguments)


def test_more_fragments_than_values_are_refused() -> None:
    strategy = OuterOptimizer(10_000, fragments=len(vector_of(mlp())) + 1)
    with pytest.raises(ConfigError, match=r"fragments are too many for the model"):
        run_world(job(strategy=strategy), DATA.shards())
