"""Rows dealt anew among workers: every row once an epoch, evenly, the same way every time."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, classification, enough_rows, make_job, mlp, relative_error

from sparkdl.collective import Network
from sparkdl.driver import Outcome
from sparkdl.errors import DeadlineError, SparkDLError, TrainingError, WorkerLostError
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.shuffle import exchange_plan
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle import Reshuffle, _Arrivals
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.transport.connection import Connection
from sparkdl.transport.handshake import MAGIC
from sparkdl.transport.port import Port

SPECS = (
    ColumnSpec("wide", torch.float32, (UNKNOWN,)),
    ColumnSpec("id", torch.int64),
    ColumnSpec("half", torch.bfloat16),
)
KNOWN = tuple(spec.of_length(3) for spec in SPECS)


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
    sizes: Sequence[int], *, epochs: int, every: int, batch_size: int = 3
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
        feed=FeedOptions(reshuffle_every=every),
    )
    outcome = run_world(job, shards)
    return [replica.seen for replica in replicas.values() if replica.seen], outcome


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(enough_rows),
    every=st.integers(0, 3),
)
def test_every_row_is_trained_on_once_an_epoch_with_and_without_exchange(
    sizes: list[int], every: int
) -> None:
    seen, outcome = train_on_ids(sizes, epochs=5, every=every)
    assert Counter(i for ids in seen for i in ids) == dict.fromkeys(range(sum(sizes)), 5)
    assert [epoch.examples for epoch in outcome.history] == [sum(sizes)] * 5


def test_workers_get_other_rows_and_as_many_of_them() -> None:
    seen, _ = train_on_ids([40, 0, 2], epochs=2, every=1)
    by_length = sorted(len(ids) for ids in seen)
    assert by_length == [14, 2 + 14, 40 + 14]
    (largest,) = (ids for ids in seen if len(ids) == 54)
    assert len(set(largest[40:])) == 14  # the rows of the second epoch, each once


def test_rows_are_exchanged_before_every_kth_epoch_only() -> None:
    seen, _ = train_on_ids([6, 6], epochs=5, every=2)
    for ids in seen:
        epochs = [set(ids[start : start + 6]) for start in range(0, 30, 6)]
        assert epochs[0] == epochs[1]
        assert epochs[2] == epochs[3]


def test_a_run_with_exchanges_ends_in_the_same_bits_every_time() -> None:
    data = classification([23, 9, 0])
    job = make_job(mlp(), epochs=4, feed=FeedOptions(reshuffle_every=1))
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
    """Train workers that exchange among themselves, their rows dealt anew."""
    folder.mkdir(exist_ok=True)
    settings = {"epochs": 4, "feed": FeedOptions(reshuffle_every=1), **changes}
    job = make_job(Recorder(folder), strategy=strategy, **settings)
    return run_world(job, data.shards(), ranks_as="processes")


AMONG_THEMSELVES: dict[str, Strategy] = {
    "all-reduce": GradientAllReduce(accumulate=2, commit_every=1),
    "executors": ParameterAveraging(2, aggregation="executors", commit_every=2),
    "hierarchical": ParameterAveraging(2, aggregation="hierarchical"),
}


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


def test_gradients_of_rows_dealt_anew_are_those_of_one_process_on_the_same_minibatches(
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


def test_all_reduced_gradients_of_rows_dealt_anew_end_in_the_same_bits_every_time(
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
    plan = exchange_plan(rows, seed=seed, epoch=epoch)
    assert (plan >= 0).all()
    assert plan.sum(axis=1).tolist() == rows
    received = plan.sum(axis=0)
    assert received.max() - received.min() <= 1


def test_a_plan_deals_as_if_every_assignment_were_equally_likely() -> None:
    plans = np.array([exchange_plan([30, 10], seed=1, epoch=e)[0, 0] for e in range(1, 2001)])
    # hypergeometric: 20 of the 40 places are rank 0's, 30 draws are rank 0's rows
    assert abs(plans.mean() - 15.0) < 0.12
    assert abs(plans.var() - 30 * 0.5 * 0.5 * 10 / 39) < 0.2


@pytest.mark.parametrize("rows", [[600_000_000, 399_999_999, 1], [7 * 10**12, 0, 3, 10**10 + 1]])
def test_a_plan_deals_more_rows_than_numpy_draws_from(rows: list[int]) -> None:
    plan = exchange_plan(rows, seed=1, epoch=2)
    assert (plan >= 0).all()
    assert plan.sum(axis=1).tolist() == rows
    received = plan.sum(axis=0)
    assert received.max() - received.min() <= 1
    expected = np.outer(rows, received / sum(rows))
    assert np.abs(plan - expected).max() < 1e-4 * max(rows)


class World:
    """Gather among threads, without an averager."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather_of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            return list(self.values)

        return gather


def filled(directory: Path, ids: Tensor) -> PartitionStore:
    store = PartitionStore(directory)
    if len(ids):
        wide = torch.stack([ids, ids * 2, ids * 3], dim=1).float()
        store.append(KNOWN, [wide, ids, ids.bfloat16()])
    return store


def dealer(rank: int, gather: Any, **changes: Any) -> Reshuffle:
    settings = {
        "rank": rank,
        "network": Network(),
        "token": "secret",
        "gather": gather,
        "specs": SPECS,
        "seed": 5,
        "deadline_s": 20.0,
        **changes,
    }
    return Reshuffle(**settings)


def test_the_columns_of_a_row_travel_together_in_large_numbers(tmp_path: Path) -> None:
    sizes, world = [300_000, 0, 1], World(3)
    starts = np.cumsum([0, *sizes])
    new = [PartitionStore(tmp_path) for _ in sizes]

    def deal(rank: int) -> None:
        ids = torch.arange(starts[rank], starts[rank + 1])
        dealer(rank, world.gather_of(rank))(
            filled(tmp_path, ids), torch.arange(len(ids)), new[rank], 2
        )

    threads = [threading.Thread(target=deal, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    columns = [store.slice(0, store.rows) for store in new]
    assert [store.rows for store in new] == [100_001, 100_000, 100_000]
    ids = torch.cat([c[1] for c in columns])
    assert torch.equal(ids.sort().values, torch.arange(300_001))
    for wide, some, half in columns:
        assert torch.equal(wide, torch.stack([some, some * 2, some * 3], dim=1).float())
        assert torch.equal(half, some.bfloat16())


def pretend(port: int, /, rows: int = 5, **lies: Any) -> Any:
    """A gather in which rank 1 is somebody else."""

    def gather(value: Any) -> list[Any]:
        return [
            value,
            {
                "host": "127.0.0.1",
                "port": port,
                "fingerprint": None,
                "rows": rows,
                "shapes": [[3], [], []],
                **lies,
            },
        ]

    return gather


def refuse(tmp_path: Path, gather: Any, error: type[SparkDLError], match: str) -> None:
    ids, new = torch.arange(5), PartitionStore(tmp_path)
    with pytest.raises(error, match=match):
        dealer(0, gather, deadline_s=1.0)(filled(tmp_path, ids), ids, new, 2)
    new.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkdl")]


@pytest.mark.parametrize(
    "lie",
    [
        {"host": None},
        {"port": "1"},
        {"port": 1 << 16},
        {"fingerprint": "0" * 64},
        {"rows": -1},
        {"rows": 1.0},
        {"rows": 1 << 63},
        {"shapes": None},
        {"shapes": "abc"},
        {"shapes": [[3], []]},
        {"shapes": [[3], [], [1]]},
        {"shapes": [[-1], [], []]},
        {"shapes": [[1 << 29], [], []]},
        {"shapes": [[[3]], [], []]},
        {"more": 1},
    ],
    ids=repr,
)
def test_what_no_worker_tells_before_an_exchange_is_refused_in_words(
    tmp_path: Path, lie: dict[str, Any]
) -> None:
    refuse(tmp_path, pretend(1, **lie), TrainingError, "^rank 1 tells .* no worker of this job")


def test_what_is_no_object_is_refused_in_words(tmp_path: Path) -> None:
    refuse(tmp_path, lambda mine: [mine, [mine]], TrainingError, "^rank 1 tells ")


def test_rows_of_another_shape_than_ones_own_are_refused(tmp_path: Path) -> None:
    lie = pretend(1, shapes=[[4], [], []])
    refuse(tmp_path, lie, TrainingError, "different shapes: rank 0 .*3.*, rank 1 .*4")


def test_no_rows_go_unencrypted_to_a_worker_that_leaves_its_certificate_out(tmp_path: Path) -> None:
    ids, new = torch.arange(5), PartitionStore(tmp_path)
    with pytest.raises(TrainingError, match=r"^rank 1 tells "):
        dealer(0, pretend(1), tls=True)(filled(tmp_path, ids), ids, new, 2)


def test_a_worker_that_is_gone_ends_the_exchange_with_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refuse(tmp_path, pretend(port), WorkerLostError, "lost rank 1 on 127.0.0.1")


def test_a_worker_that_sends_nothing_ends_the_exchange_with_its_name(tmp_path: Path) -> None:
    refuse(tmp_path, pretend(1, rows=5), SparkDLError, "rank 1")


def test_a_stranger_in_a_workers_place_gets_no_rows(tmp_path: Path) -> None:
    taken: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.sendall(MAGIC + bytes(32))
                proof = connected.recv(64)
                connected.sendall(bytes(32))  # no proof at all
                while more := connected.recv(1 << 16):
                    taken.append(more)
                assert proof

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        refuse(tmp_path, pretend(port), TrainingError, "rank 1 does not know the job's token")
        thread.join(10)
    assert taken == []


def impostors(tmp_path: Path, *sent: Any) -> tuple[PartitionStore, Any, list[Connection]]:
    """A worker that is to get two rows of rank 1, and connections on which these were said."""
    store = PartitionStore(tmp_path)
    store.create((ColumnSpec("id", torch.int64),), 2)
    arrivals = _Arrivals(store, 5.0)
    arrivals.expect(np.array([0, 2]), 0)
    connections = []
    for header in sent:
        mine, theirs = socket.socketpair()
        served = (Connection(theirs, 5.0),)
        threading.Thread(target=arrivals.serve, args=served, daemon=True).start()
        connections.append(Connection(mine, 5.0))
        connections[-1].send_header(header)
    return store, arrivals, connections


def test_a_second_connection_of_one_rank_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    def send(connection: Connection, value: int) -> dict[str, Any]:
        # The one that is refused hears it whatever it sends.
        connection.send_values(torch.full((2,), value).view(torch.uint8))
        return connection.receive_header()

    store, arrivals, (first, second) = impostors(tmp_path, {"rows_of": 1}, {"rows_of": 1})
    answers = [send(second, 7), send(first, 1)]
    (refused,) = (answer for answer in answers if "refused" in answer)
    assert "rank 1 sent its rows over a second connection" in refused["refused"]
    assert store.slice(0, 2)[0].tolist() == ([7, 7] if "written" in answers[0] else [1, 1])
    with pytest.raises(TrainingError, match="rank 1 sent its rows over a second connection"):
        arrivals.wait()


@pytest.mark.parametrize(
    "rows_of", [None, "1", True, 1.0, 7, -1, 0, [1] * 100_000], ids=lambda v: repr(v)[:9]
)
def test_rows_of_nobody_are_refused_in_words(tmp_path: Path, rows_of: Any) -> None:
    _, arrivals, (only,) = impostors(tmp_path, {"rows_of": rows_of})
    assert "sent rows that nobody expected" in only.receive_header()["refused"]
    with pytest.raises(TrainingError, match="sent rows that nobody expected") as caught:
        arrivals.wait()
    assert len(str(caught.value)) < 200


def test_who_is_refused_says_so_instead_of_going_on(tmp_path: Path) -> None:
    def refuse_rows(connection: Connection) -> None:
        connection.receive_header()
        connection.send_header({"refused": "there is one already"})
        connection.close_after(5.0)  # reads what it is sent, as one that had begun would

    port = Port("127.0.0.1", "secret", refuse_rows)
    ids = torch.arange(5)
    try:
        with pytest.raises(TrainingError, match="refused the rows of rank 0: there is one already"):
            dealer(0, pretend(port.number))(filled(tmp_path, ids), ids, PartitionStore(tmp_path), 2)
    finally:
        port.close()


def test_a_silent_worker_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    # rank 0 has no rows to send, and nobody sends it those that it should get
    new = PartitionStore(tmp_path)
    with pytest.raises(DeadlineError, match="no rows came from rank 1 for 1 s"):
        dealer(0, pretend(1), deadline_s=1.0)(
            filled(tmp_path, torch.arange(0)), torch.arange(0), new, 2
        )


def test_a_run_whose_workers_deal_their_rows_survives_no_loss() -> None:
    dealt = make_job(mlp(), max_failures=3, feed=FeedOptions(reshuffle_every=1))
    assert (dealt.survivable_losses, make_job(mlp(), max_failures=3).survivable_losses) == (0, 3)
