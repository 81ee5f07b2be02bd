"""Rows that change workers between epochs, padded ones too."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from exchanges import by_rank, exchanged, part
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, relative_error

from sparkdl.errors import TrainingError
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import FeedSchema, Ragged
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.reshuffle import RowServer, server
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import exchange_plan
from sparkdl.strategies import GradientAllReduce
from sparkdl.testing import batches_of, run_world
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

pytestmark = pytest.mark.usefixtures("nobody_stays")


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
    features = ColumnSpec("id", torch.int64), ColumnSpec("wide", torch.float32, (UNKNOWN,))
    schema = FeedSchema(features, ColumnSpec("y", torch.float32))
    sizes: Any = {"epochs": epochs, "batch_size": batch_size, "feed": FeedOptions(**options)}
    job = make_job(build, loss=nn.MSELoss(), schema=schema, **sizes)
    outcome = run_world(job, shards)
    return [replica.seen for replica in replicas.values() if replica.seen], outcome


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


def recorded(folder: Path, data: Data, rank: int) -> Iterator[list[int]]:
    """The rows that a rank trained on, minibatch by minibatch, as numbers of ``data``'s."""
    numbers = {row.tobytes(): number for number, row in enumerate(data.features)}
    for file in sorted(folder.glob(f"{rank}-*.npy")):
        yield [numbers[row.tobytes()] for row in np.load(file)]


def test_gradients_of_reshuffled_rows_are_those_of_one_process_on_the_same_minibatches(
    tmp_path: Path,
) -> None:
    data, adam = classification([23, 0, 4]), partial(torch.optim.Adam, lr=0.02)
    how: Any = {"strategy": GradientAllReduce(), "feed": FeedOptions(reshuffle_every=2)}
    job = make_job(Recorder(tmp_path), optimizer=adam, epochs=5, **how)
    outcome = run_world(job, data.shards(), ranks_as="processes")
    batches = [recorded(tmp_path, data, rank) for rank in range(3)]
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
            outputs = oracle(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            optimizer.step()
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, oracle) <= 1e-10


def planned(rows: list[int], seed: int, epoch: int) -> np.ndarray:
    """A plan that gives away every row and leaves all with the same number."""
    plan = exchange_plan(rows, len(rows), seed=seed, epoch=epoch)
    assert (plan >= 0).all()
    assert plan.sum(axis=1).tolist() == rows
    assert np.ptp(plan.sum(axis=0)) <= 1
    return plan


@given(
    rows=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    seed=st.integers(-(2**62), 2**62),
    epoch=st.integers(1, 50),
)
def test_a_plan_gives_away_every_row_and_leaves_all_with_the_same_number(
    rows: list[int], seed: int, epoch: int
) -> None:
    planned(rows, seed, epoch)


def test_a_plan_assigns_as_if_every_assignment_were_equally_likely() -> None:
    plans = np.array([exchange_plan([30, 10], 2, seed=1, epoch=e)[0, 0] for e in range(1, 2001)])
    # hypergeometric: 20 of the 40 places are rank 0's, 30 draws are rank 0's rows
    assert abs(plans.mean() - 15.0) < 0.12
    assert abs(plans.var() - 30 * 0.5 * 0.5 * 10 / 39) < 0.2


@every("rows", [[600_000_000, 399_999_999, 1], [7 * 10**12, 0, 3, 10**10 + 1]])
def test_a_plan_assigns_more_rows_than_numpy_draws_from(rows: list[int]) -> None:
    plan = planned(rows, seed=1, epoch=2)
    expected = np.outer(rows, plan.sum(axis=0) / sum(rows))
    assert np.abs(plan - expected).max() < 1e-4 * max(rows)


SPECS = (
    ColumnSpec("tokens", torch.int32, (UNKNOWN,), padding=Padding(0)),
    ColumnSpec("id", torch.int64),
    ColumnSpec("events", torch.float32, (UNKNOWN, 2), padding=Padding(0)),
)


def counts_of(ids: np.ndarray) -> np.ndarray:
    return ids * 7 % 11 % 6


def sequences(ids: np.ndarray) -> list[list[int]]:
    """The tokens of row i: i, i + 1, ..., of some rows none."""
    return [[i + k for k in range(count)] for i, count in zip(ids, counts_of(ids), strict=True)]


def columns_of(numbers: Tensor) -> list[Any]:
    ids = numbers.numpy()
    counts = torch.from_numpy(counts_of(ids))
    tokens = torch.tensor([n for row in sequences(ids) for n in row], dtype=torch.int32)
    events = torch.from_numpy(np.repeat(ids, counts_of(ids) + 1)[:, None] * [1.0, -1.0]).float()
    return [Ragged(tokens, counts), torch.from_numpy(ids), Ragged(events, counts + 1)]


def test_rows_of_unequal_length_travel_whole_in_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHUNK_BYTES", 999)
    monkeypatch.setattr(server, "LENGTHS_AT_ONCE", 100)
    monkeypatch.setattr("sparkdl.reshuffle.exchange.LENGTHS_AT_ONCE", 100)
    ranks = exchanged(tmp_path, [1700, 0, 1], SPECS, columns_of)
    ids = np.concatenate([each[1].numpy() for each in ranks])
    assert sorted(ids) == list(range(1701))
    for tokens, ids, events in ranks:
        wanted = columns_of(ids)
        for found, expected in ((tokens, wanted[0]), (events, wanted[2])):
            assert torch.equal(found.values, expected.values)
            assert torch.equal(found.lengths, expected.lengths)
    again = exchanged(tmp_path, [1700, 0, 1], SPECS, columns_of)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(ranks, again, strict=True))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30))
def test_both_ends_cut_the_same_chunks_that_begin_within_the_size(lengths: list[int]) -> None:
    spec = ColumnSpec("x", torch.float64, (UNKNOWN, 100), padding=Padding(0))
    counts = torch.tensor(lengths)
    sizes = server.chunk_sizes(len(lengths), [spec], [counts])
    assert sum(sizes) == len(lengths)
    assert min(sizes) > 0
    for chunk in torch.split(counts, sizes):
        assert int(chunk[:-1].sum()) * 800 <= server.CHUNK_BYTES


@every_row(
    ([-1, 5], "rows with -1 to 5 items in column 'tokens'"),
    ([0, 1 << 40], "rows with 0 to 1099511627776 items"),
)
def test_lengths_that_no_row_has_are_refused(
    tmp_path: Path, lengths: list[int], words: str
) -> None:
    """Rank 1 has four rows, and gives two of them to rank 0."""
    shapes = [list(spec.row_shape) for spec in SPECS]
    left = threading.Event()

    def lie(connection: Connection) -> None:
        connection.receive_header()
        connection.send_header({"rows": 2, "shapes": shapes})
        for _ in range(2):
            connection.send_values(torch.tensor(lengths))
        left.wait(20)

    port = Port("127.0.0.1", "secret", lie, encrypted=False)
    with closing(port), closing(PartitionStore(tmp_path)) as new:
        with RowServer("127.0.0.1", "secret", 20.0) as own:
            everyone = Everyone(by_rank([0, 4]), [own.address, ["127.0.0.1", port.number, None]])
            with pytest.raises(TrainingError, match=words):
                part(0, own, lambda: everyone, SPECS)(PartitionStore(tmp_path), None, new, 1)
        left.set()
