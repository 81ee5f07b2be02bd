"""Replicas on springs: EASGD, synchronous and asynchronous."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misbehaving import KillsOnce, die_after
from recorded import recorded_decisions
from simulated import Oracle, simulated
from torch import Tensor, nn
from toys import Data, batches_by_hand, classification, make_job, mlp, relative_error, schema

from sparkdl.averager import decisions as do
from sparkdl.averager.center import Center
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.events import WindowReport
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Batch, ColumnSpec, Segment
from sparkdl.replica import Replica
from sparkdl.strategies import Contributions, ElasticAveraging, ParameterAveraging, Run
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 34, 22]
DATA = classification(SIZES)
STRATEGY = ElasticAveraging(period=2, moving_rate=0.2)
ASYNCHRONOUS = ElasticAveraging(period=2, moving_rate=0.2, mode="asynchronous")


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, "deadline_s": 120.0}
    return make_job(model or mlp(), **{**settings, **changes})


def same_bits(first: Outcome, second: Outcome) -> bool:
    pairs = zip(
        first.module.state_dict().values(), second.module.state_dict().values(), strict=True
    )
    return all(torch.equal(mine, other) for mine, other in pairs)


class ByHand:
    """Zhang et al.'s algorithms 1 and 2 in numpy: flat vectors, gradients of torch.

    Args:
        rate: the moving rate.
        momentum: of each worker.
        looks_ahead: whether gradients are taken, and springs end, at x + momentum * v.
    """

    def __init__(self, rate: float, momentum: float = 0.0, *, looks_ahead: bool = False) -> None:
        self.module = mlp().train()
        self.center = self._flat(self.module.parameters())
        self._rate, self._momentum = rate, momentum
        self._ahead = momentum if looks_ahead else 0.0
        self.own = [self.center] * len(SIZES)
        self.velocity: list[Any] = [0.0] * len(SIZES)
        self.pull: list[Any] = [0.0] * len(SIZES)

    def begin(self, rank: int) -> None:
        """At the center, and at rest."""
        self.own[rank], self.velocity[rank], self.pull[rank] = self.center, 0.0, 0.0

    def place(self, rank: int) -> np.ndarray:
        """Where a worker's gradients are taken."""
        return self.own[rank] + self._ahead * self.velocity[rank]

    def train(self, rank: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for features, targets in batches:
            nn.utils.vector_to_parameters(
                torch.from_numpy(self.place(rank)), self.module.parameters()
            )
            self.module.zero_grad()
            outputs = self.module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            gradient = self._flat(p.grad for p in self.module.parameters())
            self.velocity[rank] = self._momentum * self.velocity[rank] - 0.1 * gradient
            self.own[rank] = self.own[rank] + self.velocity[rank] - self.pull[rank]
            self.pull[rank] = 0.0

    def meet(self, ranks: list[int]) -> None:
        """The exchange of some workers with one center."""
        for rank in ranks:
            self.pull[rank] = self._rate * (self.place(rank) - self.center)
        self.center = self.center + sum(self.pull[rank] for rank in ranks)

    def outcome(self) -> nn.Module:
        nn.utils.vector_to_parameters(torch.from_numpy(self.center), self.module.parameters())
        return self.module

    @staticmethod
    def _flat(tensors: Any) -> np.ndarray:
        return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def in_step(hand: ByHand, epochs: int) -> nn.Module:
    """Windows of two minibatches of all who have some left."""
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for start in range(0, max(map(len, plans)), 2):
            ranks = [rank for rank in range(3) if start < len(plans[rank])]
            for rank in ranks:
                hand.train(rank, plans[rank][start : start + 2])
            hand.meet(ranks)
    return hand.outcome()


def as_decided(decisions: list[do.Decision]) -> nn.Module:
    """What a run has committed, and nothing else."""
    hand, steps = ByHand(0.2), dict.fromkeys(range(3), 0)
    committed: list[WindowReport] = []
    for decision in decisions:
        if isinstance(decision, do.Report) and isinstance(decision.event, WindowReport):
            committed.append(decision.event)
            continue
        for window in committed:
            plan = batches_by_hand(DATA, window.rank, window.epoch, 4)
            hand.train(window.rank, plan[steps[window.rank] : window.step_of_epoch])
            steps[window.rank] = 0 if window.last else window.step_of_epoch
        hand.meet([window.rank for window in committed if window.examples])
        committed = []
        if isinstance(decision, do.Welcome):
            hand.begin(decision.member.rank)
    return hand.outcome()


def test_it_is_synchronous_easgd() -> None:
    outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, in_step(ByHand(0.2), epochs=3)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_the_paper_s_rate_is_the_default() -> None:
    outcome = run_world(job(strategy=ElasticAveraging(2)), DATA.shards())
    assert relative_error(outcome.module, in_step(ByHand(0.9 / 3), epochs=3)) < 1e-12


@pytest.mark.parametrize("nesterov", [False, True], ids=["MEASGD", "EAMSGD"])
def test_with_momentum_of_the_optimizer_it_is(nesterov: bool) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=nesterov)
    outcome = run_world(job(optimizer=optimizer), DATA.shards())
    hand = in_step(ByHand(0.2, 0.8, looks_ahead=nesterov), epochs=3)
    assert relative_error(outcome.module, hand) < 1e-11


def test_it_is_asynchronous_easgd() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=ASYNCHRONOUS), DATA.shards())
    assert relative_error(outcome.module, as_decided(decisions)) < 1e-11
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    commits = [each.contributions for each in decisions if isinstance(each, do.Commit)]
    assert {len(each.weights) for each in commits} == {0, 1}
    assert max(each.staleness for each in commits) > 0


def test_alone_both_modes_are_one() -> None:
    alone = classification([42])
    both = [run_world(job(strategy=each), alone.shards()) for each in (STRATEGY, ASYNCHRONOUS)]
    assert relative_error(both[0].module, both[1].module) < 1e-11


def test_a_round_of_springs_that_sum_to_one_is_parameter_averaging() -> None:
    """With b = workers * a = 1 the center becomes the mean, weighted alike."""
    data = classification([20, 20, 20])
    springs = job(strategy=ElasticAveraging(5, moving_rate=1 / 3), epochs=1)
    mean = job(strategy=ParameterAveraging(5, average_optimizer_state=False), epochs=1)
    first, second = (run_world(each, data.shards()).module for each in (springs, mean))
    assert relative_error(first, second) < 1e-12


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


class Point(nn.Module):
    """A number, times each row's first feature."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return self.place * features[:, 0]


def slope(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def parabola(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().mean()


def equal_rows(*values: float, steps: int) -> Data:
    """So many rows of each rank, all of its value."""
    features = np.repeat(np.array(values), steps)[:, None] * np.ones(6)
    return Data(features, np.zeros(len(features), np.int64), (steps,) * len(values))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_what_leaves_the_replicas_arrives_in_the_center(mode: Any) -> None:
    """On slopes of 1, -2, 5 each step takes that times the learning rate from the sum of all."""
    data, strategy = equal_rows(1.0, -2.0, 5.0, steps=9), Watched(2, moving_rate=0.3, mode=mode)
    sloping = job(Point(4.0), loss=slope, strategy=strategy, batch_size=1)
    center = run_world(sloping, data.shards()).module.place.item()
    found = replicas()
    assert all(each["due"] for each in found)
    kept = sum(each["own.0"] - each["pull.0"] for each in found)
    moved = 0.1 * (1 - 2 + 5) * 9 * 3
    assert center + float(kept) == pytest.approx(4 * 4.0 - moved, rel=1e-13)
    assert len({float(each["own.0"]) for each in found}) == 3


def test_next_to_no_pull_leaves_the_replicas_to_themselves() -> None:
    run_world(job(strategy=Watched(2, moving_rate=1e-14)), DATA.shards())
    hand = ByHand(0.0)
    in_step(hand, epochs=3)
    for rank, each in enumerate(replicas()):
        # ``own.0`` lies as the parameters do.
        assert np.allclose(each["own.0"].numpy(), hand.own[rank], rtol=1e-9, atol=1e-12)


def test_a_whole_pull_swaps_worker_and_center() -> None:
    """On a slope of 1 each of the two takes every second step: 0, -0.1, -0.1, -0.2, -0.2, ..."""
    data = equal_rows(1.0, steps=7)
    strategy = ElasticAveraging(1, moving_rate=1)
    swapping = job(Point(0.0), loss=slope, strategy=strategy, batch_size=1, epochs=1)
    assert run_world(swapping, data.shards()).module.place.item() == pytest.approx(-0.4)


class Clones:
    """A center and so many workers that do all alike, of which one trains.

    Args:
        strategy: theirs.
        start: where all begin.
        workers: how many they are.
    """

    def __init__(self, strategy: ElasticAveraging, start: float, workers: int) -> None:
        layout = (Segment("parameters", torch.float64, 1),)
        values = [torch.tensor([start], dtype=torch.float64)]
        update = strategy.center_update
        self.center = Center(layout, values, workers, strategy.wire_format, update)
        self._ranks = range(workers)

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        total = self.center.open_sum(self._ranks)
        for rank in self._ranks:
            total.declare(rank, window.weight)
            total.add(rank, 0, segments[0])
        self.center.commit(Contributions((window.weight,) * len(self._ranks), len(self._ranks)))
        segments[0].copy_(self.center.values[0])


def distance(rate: float, lr: float, workers: int = 1) -> float:
    """How far from the bottom of a parabola the center is after 400 steps, from 1 at the start."""
    strategy = ElasticAveraging(1, moving_rate=rate)
    clones = Clones(strategy, 1.0, workers)
    replica = Replica(Point(1.0), partial(torch.optim.SGD, lr=lr), parabola)
    run = Run(0, replica, clones, world_size=workers)  # type: ignore[arg-type]
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1)
    steps = (Batch((row[0],), row[1], last=step == 399) for step in range(400))
    strategy.train_epoch(run, strategy.start(run), steps)
    return abs(float(clones.center.values[0]))


@pytest.mark.parametrize("lr", [0.5, 1.2])
def test_the_edge_of_stability_is_the_paper_s(lr: float) -> None:
    """(4 - 2 eta) / (4 - eta) for one worker; bisected to 1 %."""
    stable, unstable = 0.0, 1.0
    assert distance(unstable, lr) > 1.0
    while unstable - stable > 0.01:
        middle = (stable + unstable) / 2
        if distance(middle, lr) < 1.0:
            stable = middle
        else:
            unstable = middle
    assert (stable + unstable) / 2 == pytest.approx((4 - 2 * lr) / (4 - lr), rel=0.02)


def test_the_edge_of_stability_of_three_in_step() -> None:
    """(4 - 2 eta) / (2 + 2 p - p eta), where an eigenvalue of what they do together passes -1.

    With s the workers' common place, (s, c) <- ((1 - eta - a) s + a c, p a s + (1 - p a) c).
    """
    edge = (4 - 2 * 0.5) / (2 + 2 * 3 - 3 * 0.5)
    assert distance(0.98 * edge, 0.5, workers=3) < 1e-2
    assert distance(1.015 * edge, 0.5, workers=3) > 1e1


@pytest.mark.parametrize("strategy", [STRATEGY, ASYNCHRONOUS], ids=["in step", "one by one"])
def test_a_killed_worker_comes_back_to_the_center(
    strategy: ElasticAveraging, tmp_path: Path
) -> None:
    killed = job(KillsOnce(tmp_path, after=12), strategy=strategy)
    with recorded_decisions() as decisions:
        outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, as_decided(decisions)) < 1e-11


def normed(dropout: float = 0.0) -> nn.Module:
    """With statistics; ranks that are threads share the random numbers that dropout draws."""
    torch.manual_seed(3)
    norm, drops = nn.BatchNorm1d(8), nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drops, nn.Linear(8, 3)).double()


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("windows", [4, 13, 20])
def test_resumed_it_ends_in_the_same_bits(tmp_path: Path, windows: int) -> None:
    resumed = job(normed(), optimizer=MOMENTUM)
    whole = run_world(resumed, DATA.shards())
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, resumed, DATA.shards(), policy)
    assert same_bits(run_world(resumed, DATA.shards(), checkpoints=policy), whole)


@pytest.mark.parametrize("windows", [3, 6, 7, 9])
def test_asynchronous_and_alone_it_resumes_in_the_same_bits(tmp_path: Path, windows: int) -> None:
    """Of seven windows an epoch the last is empty: it waits for what the others come to."""
    alone = classification([42])
    resumed = job(normed(dropout=0.3), optimizer=MOMENTUM, strategy=ASYNCHRONOUS)
    whole = run_world(resumed, alone.shards())
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, resumed, alone.shards(), policy)
    assert same_bits(run_world(resumed, alone.shards(), checkpoints=policy), whole)


@pytest.mark.parametrize("windows", [4, 14])
def test_asynchronous_it_goes_on_where_each_worker_was(tmp_path: Path, windows: int) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    interrupted = job(strategy=ASYNCHRONOUS)
    die_after(windows, interrupted, DATA.shards(), policy)
    resumed: list[object] = []
    outcome = run_world(interrupted, DATA.shards(), checkpoints=policy, on_event=resumed.append)
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    again = sum(event.examples for event in resumed if isinstance(event, WindowReport))
    assert 0 < again < 3 * sum(SIZES)


def test_with_another_rate_a_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(4, job(), DATA.shards(), policy)
    other = job(strategy=ElasticAveraging(period=2, moving_rate=0.25))
    with pytest.raises(ConfigError, match=r"strategy: was ElasticAveraging\(.*moving_rate=0.2,"):
        run_world(other, DATA.shards(), checkpoints=policy)


def test_when_all_start_again_each_replica_goes_on(tmp_path: Path) -> None:
    """Workers that deal their rows anew cannot be replaced one by one."""
    options = FeedOptions(reshuffle_every=1)
    whole = run_world(job(feed=options), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=12), feed=options)
    outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert same_bits(outcome, whole)


def test_the_center_is_what_is_validated() -> None:
    plain, held = schema(), ColumnSpec("held", torch.bool)
    columns = FeedSchema(plain.features, plain.label, validation=held)
    shards = [
        batches_of(5, features=features, label=targets, held=np.arange(len(targets)) % 3 == 0)
        for features, targets in map(DATA.shard, range(3))
    ]
    outcome = run_world(job(normed(), schema=columns), shards)
    mine = [(f[::3], t[::3]) for f, t in map(DATA.shard, range(3))]
    features, targets = (torch.from_numpy(np.concatenate(each)) for each in zip(*mine, strict=True))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(outcome.module(features), targets)
    assert outcome.history[-1].validation_loss == pytest.approx(float(loss), rel=1e-12)


def test_buffers_are_each_replica_s_own_and_the_center_has_their_mean() -> None:
    outcome = run_world(job(normed(), strategy=Watched(2)), DATA.shards())
    norm = outcome.module[1]
    found = replicas()
    # Rank 2 had no part in the epoch's last round.
    assert len({each["own.1"].sum().item() for each in found}) == 3
    assert [int(each["own.2"]) for each in found] == [10 * 3, 9 * 3, 6 * 3]
    mean = (found[0]["own.1"] + found[1]["own.1"]) / 2
    assert torch.allclose(torch.cat([norm.running_mean, norm.running_var]), mean, rtol=1e-12)


def test_asynchronously_a_worker_pulls_the_center_s_buffers() -> None:
    alone = classification([8])
    strategy = Watched(2, moving_rate=0.2, mode="asynchronous")
    norm = run_world(job(normed(), strategy=strategy, epochs=1), alone.shards()).module[1]
    (found,) = replicas()
    began = torch.cat([torch.zeros(8), torch.ones(8)]).double()
    expected = began + 0.2 * (found["own.1"] - began)
    assert torch.allclose(torch.cat([norm.running_mean, norm.running_var]), expected, rtol=1e-12)


@given(
    rate=st.floats(0.01, 1.0),
    world_size=st.integers(1, 6),
    data=st.data(),
)
def test_the_center_moves_by_the_sum_of_the_pulls_of_those_who_are_there(
    rate: float, world_size: int, data: st.DataObject
) -> None:
    there = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    numbers = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)
    start, *places = (np.array(data.draw(numbers)) for _ in range(1 + len(there)))
    update = ElasticAveraging(1, rate).center_update
    center = Center(
        (Segment("parameters", torch.float64, 4),),
        [torch.from_numpy(start.copy())],
        world_size,
        ElasticAveraging().wire_format,
        update,
    )
    total = center.open_sum(there)
    for rank, place in zip(there, places, strict=True):
        total.declare(rank, 1)
        total.add(rank, 0, torch.from_numpy(place))
    center.commit(Contributions((1,) * len(there), world_size))
    expected = start + sum(rate * (place - start) for place in places)
    assert np.allclose(center.values[0].numpy(), expected, rtol=1e-9, atol=1e-9)


def moved_by_hand(rate: float) -> Oracle:
    """The update once more, for one number; simulated workers have weights, which the mean has."""

    def move(
        center: float,
        contributions: Contributions,
        values: Mapping[int, float],
        begun: Mapping[int, float],
    ) -> float:
        total = sum(w * v for w, v in zip(contributions.weights, values.values(), strict=True))
        mean = total / sum(contributions.weights)
        return center + rate * len(values) * (mean - center)

    return move


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("strategy", [STRATEGY, ASYNCHRONOUS], ids=["in step", "one by one"])
def test_every_schedule_ends_with_the_center_that_its_commits_give(
    strategy: ElasticAveraging,
) -> None:
    outcomes = simulated(strategy, partial(moved_by_hand, 0.2), range(200))
    assert sum(outcome.failure is None for outcome in outcomes) > 150
    assert sum(outcome.losses for outcome in outcomes) > 50


def test_a_rate_at_which_the_center_overshoots_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"moving_rate=0.9 is too much for 3 workers.*0.5; .*0.3"):
        run_world(job(strategy=ElasticAveraging(2, moving_rate=0.9)), DATA.shards())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"period": 0}, "period must be a whole number >= 1 of steps, got 0"),
        ({"period": True}, "period must be a whole number >= 1 of steps, got True"),
        ({"moving_rate": 0.0}, "or a number > 0 and <= 1, got 0.0"),
        ({"moving_rate": 1.1}, "or a number > 0 and <= 1, got 1.1"),
        ({"moving_rate": float("nan")}, "or a number > 0 and <= 1, got nan"),
        ({"moving_rate": True}, "or a number > 0 and <= 1, got True"),
        ({"moving_rate": "0.1"}, "or a number > 0 and <= 1, got '0.1'"),
        ({"moving_rate": 1.0, "mode": "asynchronous"}, "< 1 in asynchronous mode, got 1.0"),
        ({"mode": "hogwild"}, "mode must be one of synchronous, asynchronous, got 'hogwild'"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ElasticAveraging(**arguments)
    assert words in str(caught.value)


def test_two_runs_end_in_the_same_bits() -> None:
    first, second = (run_world(job(normed()), DATA.shards()) for _ in range(2))
    assert same_bits(first, second)
