"""What workers show each other in gossip, mixed as matrices say, over connections without a run."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from visits import connected

from sparkdl.errors import DisconnectedError, TrainingError
from sparkdl.strategies.gossip import shown
from sparkdl.strategies.gossip.gossip_averaging import TOPOLOGIES, peer_of
from sparkdl.strategies.gossip.shown import MODES, Shown


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "STRETCH", 3)


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


def off_the_mean(rows: np.ndarray) -> float:
    return float(((rows - rows.mean(0)) ** 2).sum())


def random_pairs(n: int) -> np.ndarray:
    """The mean of the matrices of a visit of anyone to anyone else."""
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return sum(matrix(n, "push_pull", i, j) for i, j in pairs) / len(pairs)


def test_replicas_come_together_as_fast_as_the_second_eigenvalue_says() -> None:
    """E|x - mean|^2 after t visits of random pairs is l^t of the first: W is a projection."""
    n, visits, trials = 5, 12, 150
    (*_, second, first) = np.linalg.eigvalsh(random_pairs(n))
    assert first == pytest.approx(1)
    assert second == pytest.approx(1 - 1 / (n - 1))
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(trials):
        start = generator.normal(size=(n, 2))
        shown = [Shown([torch.from_numpy(row.copy())]) for row in start]
        for each in shown:
            each.epoch = 1
        for _ in range(visits):
            caller, called = (shown[i] for i in generator.choice(n, 2, replace=False))
            caller.values[0] -= called._meet(0, caller.values[0].clone(), 1, share=False)
        ratios.append(off_the_mean(np.stack([s.values[0] for s in shown])) / off_the_mean(start))
    spread = np.std(ratios) / np.sqrt(trials)
    assert np.mean(ratios) == pytest.approx(second**visits, abs=4 * spread)
    assert spread < 0.3 * second**visits


def test_on_a_ring_too_turn_after_turn() -> None:
    """The slowest part of the distance is left in the end, and shrinks by the eigenvalue."""
    n = 6
    both_ways = np.eye(n)
    for iteration in (0, 1):
        for rank in range(n):
            peer = peer_of("ring", rank, n, 1, iteration)
            both_ways = matrix(n, "push_pull", rank, peer) @ both_ways
    second = sorted(np.abs(np.linalg.eigvals(both_ways)))[-2]
    workers = [Worker(row) for row in np.random.default_rng(2).normal(size=(n, 2))]
    distances = []
    for iteration in range(24):
        for rank, worker in enumerate(workers):
            worker.call_on(workers[peer_of("ring", rank, n, 1, iteration)], "push_pull")
        if iteration % 2:
            shown = np.stack([worker.shown.values[0] for worker in workers])
            distances.append(np.sqrt(off_the_mean(shown)))
    rates = [later / earlier for earlier, later in pairwise(distances)]
    assert np.exp(np.mean(np.log(rates[-4:]))) == pytest.approx(second, rel=0.05)


@every("n", [2, 4, 8])
def test_log2_turns_of_the_exponential_topology_form_the_mean(n: int) -> None:
    """If all pull at once, as matrices."""
    product = np.eye(n)
    for iteration in range(n.bit_length() - 1):
        peers = [peer_of("exponential", rank, n, 1, iteration) for rank in range(n)]
        product = (np.eye(n) + np.eye(n)[peers]) / 2 @ product
    np.testing.assert_allclose(product, 1 / n)


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


def test_workers_that_visit_each_other_at_once_lose_nothing() -> None:
    generator = np.random.default_rng(5)
    start = generator.normal(size=(4, 40))
    workers = [Worker(row) for row in start]

    def train(rank: int) -> None:
        for iteration in range(15):
            workers[rank].learn(np.full(40, 0.5))
            workers[rank].call_on(workers[peer_of("random", rank, 4, 1, iteration)], "push_pull")

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    got = np.stack([worker.end() for worker in workers])
    np.testing.assert_allclose(got.sum(0), start.sum(0) + 4 * 15 * 0.5, rtol=1e-12)


def test_who_has_ended_its_epoch_or_is_in_another_is_away() -> None:
    one, other = Worker(np.zeros(4)), Worker(np.ones(4))
    before = other.end().copy()
    assert not one.call_on(other, "push_pull")
    other.shown.open(2, other.mine)
    assert not one.call_on(other, "push")
    np.testing.assert_array_equal(other.end(), before)
    np.testing.assert_array_equal(one.end(), 0)


@every(
    "header",
    [
        {},
        {"gossip": "shout", "epoch": 1, "values": 4},
        {"gossip": "pull", "epoch": "1", "values": 4},
        {"gossip": "pull", "epoch": 1, "values": 5},
        {"gossip": "pull", "epoch": 1, "values": None},
    ],
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
