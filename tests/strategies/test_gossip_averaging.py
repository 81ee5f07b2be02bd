"""GossipAveraging in whole runs: rows, losses, bytes, lost workers, checkpoints."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
import trainings
from by_keyword import run
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from members import connected
from misbehaving import ranks
from torch import Tensor, nn
from toys import classification, mlp
from trainings import DATA, SIZES
from virtual_time import VirtualClock

from sparkdl.averager import Averager, client
from sparkdl.collective import peers as peers_module
from sparkdl.collective.peers import Peers
from sparkdl.errors import DisconnectedError, TrainingError
from sparkdl.strategies import GossipAveraging, gossip_values
from sparkdl.strategies.gossip_averaging import TOPOLOGIES, peer_of
from sparkdl.strategies.gossip_values import MODES, Shown
from sparkdl.testing import run_world
from sparkdl.transport.connection import Connection

cloudpickle.register_pickle_by_value(misbehaving)


job = partial(trainings.job, strategy=GossipAveraging())


class Visits:
    """Counts visits of the ranks of this process, and the bytes of values that they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, int]] = []
        self.octets: Counter[str] = Counter()
        visit, talk, send = Peers.visit, Shown.visit, Connection.send_values
        counted = self

        def counting(peers: Peers, rank: int, *arguments: Any) -> Any:
            came = visit(peers, rank, *arguments)
            counted.made += [(peers.rank, rank)] * bool(came)
            return came

        def talking(shown: Shown, connection: Connection, mode: str) -> bool:
            connection.is_of_visitor = True  # type: ignore[attr-defined]
            return talk(shown, connection, mode)

        def sending(connection: Connection, values: Tensor, *header: Any) -> None:
            # The driver's connections are of another kind but on the workers' side.
            if is_of_visit(connection):
                counted.octets["visitors" if hasattr(connection, "is_of_visitor") else "hosts"] += (
                    values.nbytes
                )
            send(connection, values, *header)

        monkeypatch.setattr(Peers, "visit", counting)
        monkeypatch.setattr(Shown, "visit", talking)
        monkeypatch.setattr(Connection, "send_values", sending)


def is_of_visit(connection: Connection) -> bool:
    name = threading.current_thread().name
    return hasattr(connection, "is_of_visitor") or name == "sparkdl-port-connection"


@every("mode", MODES)
def test_rows_count_once_and_visits_move_the_bytes_of_the_formula(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = Visits(monkeypatch)
    given = job(strategy=GossipAveraging(period=2, mode=mode, topology="ring"))
    outcome = run_world(given, DATA.shards())
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    # Of 10, 9 and 6 steps: after 2, 4, ... but for the last, which is the epoch's end.
    iterations = {0: 3 * 4, 1: 3 * 4, 2: 3 * 2}
    made = Counter(caller for caller, _ in visits.made)
    assert all(0 < made[rank] <= most for rank, most in iterations.items())
    size = sum(parameter.nbytes for parameter in outcome.module.parameters())
    ways = {"pull": (0, 1), "push": (1, 0), "push_pull": (1, 1)}[mode]
    expected = [way * len(visits.made) * size for way in ways]
    assert [visits.octets["visitors"], visits.octets["hosts"]] == expected


def test_over_connections_that_are_encrypted_too() -> None:
    outcome = run_world(job(tls=True, epochs=1), DATA.shards())
    assert outcome.history[0].examples == sum(SIZES)


def test_who_is_not_there_is_skipped_at_once_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(peers_module.time, "monotonic", lambda: now)
    tried: list[int] = []

    def reach(rank: int, silence_s: float) -> Connection:
        tried.append(rank)
        raise DisconnectedError("no route")

    others = Peers(0, reach)
    for seconds in (0.0, 0.5, 0.9):
        now = 100.0 + seconds
        assert others.visit(1, lambda there: True) is None
    assert tried == [1]
    now = 101.1
    assert others.visit(1, lambda there: True) is None
    assert others.visit(2, lambda there: True) is None
    assert tried == [1, 1, 2]


def test_an_epoch_may_be_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver hears of who trains, though no values come."""
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.0)
    clock, averagers = VirtualClock(), list[Averager]()

    class Slow(nn.Module):
        """One rank takes a quarter of the deadline for each step."""

        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, features: Tensor) -> Tensor:
            if threading.current_thread().name == "sparkdl-rank-1":
                clock.run(averagers[0], 15)
            outputs: Tensor = self.net(features)
            return outputs

    data = classification([4, 40, 4])
    given = job(Slow(), deadline_s=60.0, epochs=1, max_failures=0, strategy=GossipAveraging(5))
    launch = ranks(given, data.shards(), {rank: rank for rank in range(3)}, averagers)
    outcome = run(given, 3, launch, now=clock)
    assert clock.passed == 2.5 * 60
    assert outcome.history[0].examples == 48


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_values, "STRETCH", 3)


class Worker:
    """One that trains when told to, and shows itself as the strategy has it."""

    def __init__(self, values: np.ndarray) -> None:
        self.mine = [torch.from_numpy(values.copy())]
        self.shown = Shown(self.mine)
        self.shown.open(1, self.mine)

    def learn(self, change: np.ndarray) -> None:
        self.mine[0] += torch.from_numpy(change)

    def call_on(self, other: Worker, mode: str) -> bool:
        self.shown.publish(self.mine)
        with connected(other.shown) as connection:
            was_there = self.shown.visit(connection, mode)
        self.shown.adopt(self.mine)
        return was_there

    def end(self) -> np.ndarray:
        self.shown.publish(self.mine, last=True)
        self.shown.adopt(self.mine)
        return self.mine[0].numpy()


def matrix(n: int, mode: str, caller: int, called: int) -> np.ndarray:
    """By what one visit multiplies the workers' values."""
    mixed = np.eye(n)
    for mixes, other in ((caller, called), (called, caller)):
        if mode == "push_pull" or (mode == "pull") == (mixes == caller):
            mixed[mixes, mixes], mixed[mixes, other] = 0.5, 0.5
    return mixed


@every("mode", MODES)
@every("topology", TOPOLOGIES)
def test_visits_multiply_the_workers_by_the_mixing_matrices(mode: str, topology: str) -> None:
    n, generator = 5, np.random.default_rng(1)
    expected = generator.normal(size=(n, 7))
    workers = [Worker(row) for row in expected]
    for iteration in range(4):
        for rank, worker in enumerate(workers):
            peer = peer_of(topology, rank, n, 1, iteration)
            assert worker.call_on(workers[peer], mode)
            if mode == "push":  # once each, so that a mean is one of two
                workers[peer].shown._pushed.clear()
            expected = matrix(n, mode, rank, peer) @ expected
    got = np.stack([worker.end() for worker in workers])
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_all_that_was_pushed_counts_alike_until_the_worker_mixes_itself() -> None:
    one, *others = (Worker(np.full(4, float(value))) for value in (1, 5, 9))
    for other in others:
        other.call_on(one, "push")
    one.shown.publish(one.mine)
    one.shown.adopt(one.mine)
    np.testing.assert_allclose(one.mine[0], (1 + 5 + 9) / 3)
    others[0].call_on(one, "push")
    np.testing.assert_allclose(one.end(), (5 + 5) / 2)


@every("topology", TOPOLOGIES)
@every("n", [2, 3, 7, 100])
def test_a_peer_is_another_worker_and_everyone_is_reached(topology: str, n: int) -> None:
    reached = {0}
    for iteration in range(120):
        peers = [peer_of(topology, rank, n, 3, iteration) for rank in range(n)]
        assert all(0 <= peer < n and peer != rank for rank, peer in enumerate(peers))
        assert peers == [peer_of(topology, rank, n, 3, iteration) for rank in range(n)]
        reached |= {peers[rank] for rank in list(reached)}
    assert reached == set(range(n))


EVENTS = st.lists(st.tuples(*[st.integers(0, 3)] * 2, st.booleans()), max_size=25)


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 1000))
def test_whatever_the_order_nothing_that_was_learned_is_lost(
    events: list[tuple[int, int, bool]], seed: int
) -> None:
    """The sum of all workers is what they began with and what they have learned since."""
    generator = np.random.default_rng(seed)
    start = generator.normal(size=(4, 5))
    workers = [Worker(row) for row in start]
    total = start.sum(0)
    for caller, called, learns in events:
        if learns or caller == called:
            change = generator.normal(size=5)
            workers[caller].learn(change)
            total = total + change
        else:
            workers[caller].call_on(workers[called], "push_pull")
    np.testing.assert_allclose(sum(worker.end() for worker in workers), total, atol=1e-12)


def test_who_has_ended_its_epoch_or_is_in_another_is_away() -> None:
    one, other = Worker(np.zeros(4)), Worker(np.ones(4))
    before = other.end().copy()
    assert not one.call_on(other, "push_pull")
    other.shown.open(2, other.mine)
    assert not one.call_on(other, "push")
    np.testing.assert_array_equal(other.end(), before)
    np.testing.assert_array_equal(one.end(), 0)


@every_row(
    {},
    {"gossip": "shout", "epoch": 1, "values": 4},
    {"gossip": "pull", "epoch": "1", "values": 4},
    {"gossip": "pull", "epoch": 1, "values": 5},
    {"gossip": "pull", "epoch": 1, "values": None},
)
def test_a_visit_that_no_worker_makes_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="expected a visit to 4 values, got"):
        say(Worker(np.zeros(4)).shown, header)


@every("mode", ["push", "push_pull"])
def test_what_is_not_finite_stays_out(mode: str) -> None:
    host = Worker(np.zeros(3))
    header = {"gossip": mode, "epoch": 1, "values": 3}
    with pytest.raises(TrainingError, match="1 NaN or infinite"):
        say(host.shown, header, torch.tensor([0.0, float("inf"), 0.0], dtype=torch.float64))
    np.testing.assert_array_equal(host.end(), 0)


def say(host: Shown, header: dict[str, Any], *values: torch.Tensor) -> None:
    """Visit a worker as no other would, and wait until it has left."""
    with connected(host) as connection:
        connection.send_header(header)
        if values:
            assert connection.receive_header() == {"go": True}
        for each in values:
            connection.send_values(each)
        with pytest.raises(DisconnectedError):
            connection.receive_header()


def test_half_precision_loses_nothing_of_many_small_pushes() -> None:
    mine = [torch.ones(4, dtype=torch.bfloat16)]
    shown = Shown([torch.ones(4)])
    shown.open(1, mine)
    for _ in range(16):
        shown.publish(mine)
        shown.adopt(mine)
        shown.values[0] += 2.0**-10  # what a visitor does, an eighth of what the replica can hold
    shown.publish(mine)
    shown.adopt(mine)
    assert mine[0].float().tolist() == [1 + 2.0**-6] * 4
