"""The exchange of rows, and its memory."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, classification, enough_rows, make_job, mlp, relative_error

from sparkdl.driver import Outcome
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle.server import exchange_plan
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world


class Ids(nn.Module):
    """Remembers which rows it was trained on, minibatch by minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, ids: Tensor, wide: Tensor) -> Tensor:
        assert torch.equal(wide, torch.stack([ids, -ids], dim=1).float())
        self.seen.extend(ids.tolist())
        return self.weight.expand(len(ids))


def train_on_ids(
    sizes: Sequence[int], *, epochs: int, batch_size: int = 3, **options: Any
) -> tuple[list[list[int]], Any]:
    """The ids that each rank saw, in order."""
    replicas: dict[int, Ids] = {}

    def build() -> nn.Module:
        model = Ids()
        replicas[threading.get_ident()] = model
        return model

    ids = np.arange(sum(sizes), dtype=np.int64)
    starts = np.cumsum([0, *sizes])
    shards = []
    for start, stop in itertools.pairwise(starts):
        part = ids[start:stop]
        wide = np.stack([part, -part], axis=1).astype(np.float32)
        columns = {"id": part, "wide": wide, "y": np.zeros(len(part), np.float32)}
        shards.append(batches_of(4, **columns) if len(part) else [])
    job = make_job(
        build,
        loss=nn.MSELoss(),
        schema=FeedSchema(
            (ColumnSpec("id", torch.int64), ColumnSpec("wide", torch.float32, (UNKNOWN,))),
            ColumnSpec("y", torch.float32),
        ),
        epochs=epochs,
        batch_size=batch_size,
        feed=FeedOptions(**options),
    )
    outcome = run_world(job, shards)
    return [replica.seen for replica in replicas.values() if replica.seen], outcome


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(enough_rows),
    every=st.integers(0, 3),
    first=st.booleans(),
)
@pytest.mark.nightly
def test_every_row_is_trained_on_once_an_epoch_with_and_without_exchange(
    sizes: list[int], every: int, first: bool
) -> None:
    seen, outcome = train_on_ids(sizes, epochs=5, reshuffle_every=every, exchange_rows=first)
    assert Counter(i for ids in seen for i in ids) == dict.fromkeys(range(sum(sizes)), 5)
    assert [epoch.examples for epoch in outcome.history] == [sum(sizes)] * 5


def test_workers_get_other_rows_and_as_many_of_them() -> None:
    seen, _ = train_on_ids([40, 0, 2], epochs=2, reshuffle_every=1)
    by_length = sorted(len(ids) for ids in seen)
    assert by_length == [14, 2 + 14, 40 + 14]
    (largest,) = (ids for ids in seen if len(ids) == 54)
    assert len(set(largest[40:])) == 14  # the rows of the second epoch, each once


def test_rows_are_exchanged_before_every_kth_epoch_only() -> None:
    seen, _ = train_on_ids([6, 6], epochs=5, reshuffle_every=2)
    for ids in seen:
        epochs = [set(ids[start : start + 6]) for start in range(0, 30, 6)]
        assert epochs[0] == epochs[1]
        assert epochs[2] == epochs[3]


def test_rows_are_exchanged_before_the_first_epoch_and_then_stay() -> None:
    seen, _ = train_on_ids([40, 0, 2], epochs=3, exchange_rows=True)
    assert [len(ids) for ids in seen] == [3 * 14] * 3
    assert all(set(ids[:14]) == set(ids[14:28]) == set(ids[28:]) for ids in seen)


@every("options", [{"reshuffle_every": 1}, {"exchange_rows": True}])
def test_a_run_with_exchanges_ends_in_the_same_bits_every_time(options: dict[str, Any]) -> None:
    data = classification([23, 9, 0])
    job = make_job(mlp(), epochs=4, feed=FeedOptions(**options))
    states = [run_world(job, data.shards()).module.state_dict() for _ in range(3)]
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in state)


def test_a_run_with_exchanges_differs_from_one_without() -> None:
    data = classification([23, 9])
    states = [
        run_world(make_job(mlp(), epochs=2, feed=FeedOptions(reshuffle_every=k)), data.shards())
        for k in (0, 1)
    ]
    first, second = (s.module.state_dict() for s in states)
    assert not all(torch.equal(first[key], second[key]) for key in first)


class Recorder(nn.Module):
    """Keeps the rows of each minibatch in a file of its rank's."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = mlp()
        self.folder = folder
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        rank = multiprocessing.current_process().name.rpartition(" ")[2]
        np.save(self.folder / f"{rank}-{self.passes:03d}.npy", features.numpy())
        self.passes += 1
        return self.net(features)


def recorded(folder: Path, data: Data) -> list[list[list[int]]]:
    """The rows that each rank trained on, minibatch by minibatch, as numbers of ``data``'s."""
    numbers = {row.tobytes(): number for number, row in enumerate(data.features)}
    return [
        [
            [numbers[row.tobytes()] for row in np.load(file)]
            for file in sorted(folder.glob(f"{rank}-*.npy"))
        ]
        for rank in range(len(data.sizes))
    ]


def among_themselves(folder: Path, strategy: Strategy, data: Data, **changes: Any) -> Outcome:
    """Train workers that exchange among themselves, with reshuffled rows."""
    folder.mkdir(exist_ok=True)
    settings = {"epochs": 4, "feed": FeedOptions(reshuffle_every=1), **changes}
    job = make_job(Recorder(folder), strategy=strategy, **settings)
    return run_world(job, data.shards(), ranks_as="processes")


AMONG_THEMSELVES: dict[str, Strategy] = {
    "all-reduce": GradientAllReduce(accumulate=2, commit_every=1),
    "executors": ParameterAveraging(2, aggregation="executors", commit_every=2),
    "hierarchical": ParameterAveraging(2, aggregation="hierarchical"),
}


@pytest.mark.nightly_variants
@pytest.mark.parametrize("name", AMONG_THEMSELVES)
def test_workers_that_exchange_among_themselves_train_on_every_row_once_an_epoch(
    tmp_path: Path, name: str
) -> None:
    data = classification([23, 0, 4])
    outcome = among_themselves(tmp_path, AMONG_THEMSELVES[name], data)
    assert [epoch.examples for epoch in outcome.history] == [27] * 4
    ranks = recorded(tmp_path, data)
    seen = [[row for batch in batches for row in batch] for batches in ranks]
    assert Counter(itertools.chain(*seen)) == dict.fromkeys(range(27), 4)
    # 9 rows each in three epochs, and those that were read in the first
    assert [len(rows) for rows in seen] == [23 + 27, 27, 4 + 27]
    assert all(len(set(rows[-27:-18])) == 9 for rows in seen)


def test_gradients_of_reshuffled_rows_are_those_of_one_process_on_the_same_minibatches(
    tmp_path: Path,
) -> None:
    data, adam = classification([23, 0, 4]), partial(torch.optim.Adam, lr=0.02)
    options = FeedOptions(reshuffle_every=2)
    outcome = among_themselves(
        tmp_path, GradientAllReduce(), data, optimizer=adam, feed=options, epochs=5
    )
    batches = [iter(of_rank) for of_rank in recorded(tmp_path, data)]
    oracle = mlp().train()
    optimizer = adam(oracle.parameters())
    for epoch in range(1, 6):
        # 23 rows are 6 minibatches of 4, 9 rows are 3; a worker has no more of them than that
        left = [3, 3, 3] if epoch > 2 else [6, 0, 1]
        for _ in range(max(left)):
            rows = [row for rank in range(3) if left[rank] for row in next(batches[rank])]
            left = [max(0, steps - 1) for steps in left]
            optimizer.zero_grad()
            features, targets = data.features[rows], data.targets[rows]
            nn.functional.cross_entropy(
                oracle(torch.from_numpy(features)), torch.from_numpy(targets)
            ).backward()
            optimizer.step()
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, oracle) <= 1e-10


def test_all_reduced_gradients_of_reshuffled_rows_end_in_the_same_bits_every_time(
    tmp_path: Path,
) -> None:
    data = classification([22, 9])
    first, second = (
        among_themselves(tmp_path, GradientAllReduce(), data, epochs=3) for _ in range(2)
    )
    for key, values in first.module.state_dict().items():
        assert torch.equal(values, second.module.state_dict()[key])


@given(
    rows=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    seed=st.integers(-(2**62), 2**62),
    epoch=st.integers(1, 50),
)
def test_a_plan_gives_away_every_row_and_leaves_all_with_the_same_number(
    rows: list[int], seed: int, epoch: int
) -> None:
    plan = exchange_plan(rows, len(rows), seed=seed, epoch=epoch)
    assert (plan >= 0).all()
    assert plan.sum(axis=1).tolist() == rows
    received = plan.sum(axis=0)
    assert received.max() - received.min() <= 1


def test_a_plan_assigns_as_if_every_assignment_were_equally_likely() -> None:
    plans = np.array([exchange_plan([30, 10], 2, seed=1, epoch=e)[0, 0] for e in range(1, 2001)])
    # hypergeometric: 20 of the 40 places are rank 0's, 30 draws are rank 0's rows
    assert abs(plans.mean() - 15.0) < 0.12
    assert abs(plans.var() - 30 * 0.5 * 0.5 * 10 / 39) < 0.2


@every("rows", [[600_000_000, 399_999_999, 1], [7 * 10**12, 0, 3, 10**10 + 1]])
def test_a_plan_assigns_more_rows_than_numpy_draws_from(rows: list[int]) -> None:
    plan = exchange_plan(rows, len(rows), seed=1, epoch=2)
    assert (plan >= 0).all()
    assert plan.sum(axis=1).tolist() == rows
    received = plan.sum(axis=0)
    assert received.max() - received.min() <= 1
    expected = np.outer(rows, received / sum(rows))
    assert np.abs(plan - expected).max() < 1e-4 * max(rows)
