"""D-PSGD: neighbours mix at the same time, as products of doubly stochastic matrices say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trainings
from every_row import every, every_row
from members import connected
from torch import nn
from toys import Data, batches_by_hand, classification, mlp, relative_error

from sparkdl.errors import TrainingError
from sparkdl.strategies import GossipAveraging, gossip_lockstep, gossip_values
from sparkdl.strategies.gossip_averaging import TOPOLOGIES
from sparkdl.strategies.gossip_lockstep import Snapshots, lead_of, neighbors_of
from sparkdl.testing import run_world
from sparkdl.transport.connection import Connection

SIZES = [40, 33, 21, 16]
"""Of batches of 4: 10, 9, 6 and 4 steps an epoch."""
DATA = classification(SIZES)
RING = GossipAveraging(1, "symmetric", "ring")


job = partial(trainings.job, strategy=RING, epochs=2)


def metropolis(topology: str, n: int, iteration: int, there: set[int] | None = None) -> np.ndarray:
    """Metropolis and Hastings' weights; who is not there is mixed with by nobody."""
    present = set(range(n)) if there is None else there
    met = [neighbors_of(topology, rank, n, 1, iteration) for rank in range(n)]
    mixing = np.zeros((n, n))
    for i in range(n):
        for j in met[i]:
            if {i, j} <= present:
                mixing[i, j] = 1 / (1 + max(len(met[i]), len(met[j])))
    return mixing + np.diag(1 - mixing.sum(1))


@every("topology", TOPOLOGIES)
@every("n", [1, 2, 3, 4, 7, 16])
def test_the_mixing_matrix_is_symmetric_doubly_stochastic_and_brings_all_together(
    topology: str, n: int
) -> None:
    product = np.eye(n)
    for iteration in range(12 * n):
        mixing = metropolis(topology, n, iteration)
        assert (mixing >= 0).all()
        np.testing.assert_array_equal(mixing, mixing.T)
        np.testing.assert_allclose(mixing.sum(0), 1)
        product = mixing @ product
    np.testing.assert_allclose(product, 1 / n, atol=0.02)


def by_hand(data: Data, topology: str, period: int, epochs: int) -> nn.Module:
    """In one process, with flat vectors."""
    n, module = len(data.sizes), mlp().train()
    flat = nn.utils.parameters_to_vector
    center = flat(module.parameters()).detach().numpy().copy()
    for epoch in range(1, epochs + 1):
        own = np.stack([center] * n)
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in range(n)]
        for step in range(1, max(map(len, plans)) + 1):
            for rank in range(n):
                if step <= len(plans[rank]):
                    own[rank] = stepped(module, own[rank], *plans[rank][step - 1])
            if step % period == 0:
                there = {rank for rank in range(n) if step < len(plans[rank])}
                own = metropolis(topology, n, 0, there) @ own
        center = np.average(own, axis=0, weights=data.sizes)
    nn.utils.vector_to_parameters(torch.from_numpy(center.copy()), module.parameters())
    return module


def stepped(
    module: nn.Module, values: np.ndarray, features: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), module.parameters())
    module.zero_grad()
    outputs = module(torch.from_numpy(features))
    nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in module.parameters()])
    return values - 0.1 * gradient


@every_row(("ring", 1), ("exponential", 2))
def test_a_training_is_the_product_of_steps_and_matrices(topology: Any, period: int) -> None:
    strategy = GossipAveraging(period, "symmetric", topology)
    outcome = run_world(job(strategy=strategy), DATA.shards())
    assert relative_error(outcome.module, by_hand(DATA, topology, period, 2)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 2


class Ranks:
    """Workers that do not learn, in threads; each mixes for as many iterations as it is told."""

    def __init__(self, values: np.ndarray, topology: str = "ring") -> None:
        self.values = torch.from_numpy(values.copy())
        self.topology = topology
        self.shown = [Snapshots([row]) for row in self.values]
        self.skipped: list[tuple[int, int, int]] = []
        self.late: set[tuple[int, int]] = set()
        """Ranks, and the iterations to which they come when others could have gone on."""

    def mix(self, iterations: list[int], waits: Callable[[], bool] = lambda: True) -> np.ndarray:
        def train(rank: int) -> None:
            shown, mine, n = self.shown[rank], self.values[rank], len(self.values)
            shown.open(1, lead_of(self.topology, n))
            with ExitStack() as stack:
                connections = {
                    r: stack.enter_context(connected(s)) for r, s in enumerate(self.shown)
                }
                for iteration in range(iterations[rank]):
                    if (rank, iteration) in self.late:
                        time.sleep(0.1)
                    shown.await_visits(iteration, waits)
                    (own,) = shown.publish(iteration, [mine])
                    peers = neighbors_of(self.topology, rank, n, 1, iteration)
                    for peer in peers:
                        if shown.visit(connections[peer], 1, iteration, waits):
                            mine += (shown.room[0] - own) / (1 + len(peers))
                        else:
                            self.skipped.append((rank, peer, iteration))
                shown.end()

        with ThreadPoolExecutor(len(self.values)) as threads:
            list(threads.map(train, range(len(self.values))))
        return self.values.numpy()


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_values, "STRETCH", 3)


def test_who_has_no_more_turns_is_mixed_with_at_its_last_and_by_nobody_after() -> None:
    start = np.random.default_rng(4).normal(size=(5, 4))
    ranks, iterations = Ranks(start), [6, 2, 6, 4, 6]
    got = ranks.mix(iterations)
    expected = start
    for iteration in range(6):
        there = {rank for rank, count in enumerate(iterations) if iteration < count}
        expected = metropolis("ring", 5, iteration, there) @ expected
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert {(peer, iteration) for _, peer, iteration in ranks.skipped} == {
        (peer, iteration) for peer in (1, 3) for iteration in range(iterations[peer], 6)
    }


@every("topology", TOPOLOGIES)
@every("n", [4, 7])
def test_who_is_late_is_waited_for_by_those_that_it_meets_turns_later(
    topology: str, n: int
) -> None:
    start = np.random.default_rng(3).normal(size=(n, 5))
    ranks, until = Ranks(start, topology), time.monotonic() + 60
    ranks.late = {(0, 2), (n - 1, 5)}
    got = ranks.mix([8] * n, lambda: time.monotonic() < until)
    assert not ranks.skipped
    expected = start
    for iteration in range(8):
        expected = metropolis(topology, n, iteration) @ expected
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def asked(shown: Snapshots, epoch: int, iteration: int, waits: Callable[[], bool]) -> bool:
    visitor = Snapshots([torch.zeros(4, dtype=torch.float64)])
    with connected(shown) as connection:
        return visitor.visit(connection, epoch, iteration, waits)


def test_who_is_turns_behind_is_done_without_and_does_without_the_others() -> None:
    values = [torch.arange(4, dtype=torch.float64)]
    ahead, behind = Snapshots(values), Snapshots(values)
    ahead.open(1)
    behind.open(1)
    for iteration in range(4):
        ahead.publish(iteration, values)
    never = partial(pytest.fail, "it waits")
    assert not asked(behind, 1, 3, never)
    assert not asked(ahead, 1, 1, never)
    assert [asked(ahead, 1, iteration, never) for iteration in (2, 3)] == [True, True]
    assert not asked(ahead, 3, 0, never)


def test_who_has_yet_to_come_there_is_waited_for_until_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gossip_lockstep, "SAID_EVERY_S", 0.01)
    values = [torch.arange(4, dtype=torch.float64)]
    shown = Snapshots(values)
    patience = [True] * 3
    assert not asked(shown, 1, 0, lambda: bool(patience and patience.pop()))
    assert not patience
    threading.Timer(0.05, lambda: (shown.open(1), shown.publish(0, values))).start()
    assert asked(shown, 1, 0, lambda: True)
    shown.end()
    assert not asked(shown, 1, 1, lambda: True)
    threading.Timer(0.05, lambda: (shown.open(2), shown.publish(0, values))).start()
    assert asked(shown, 2, 0, lambda: True)


@every_row(
    {},
    {"gossip": "pull", "epoch": 1, "iteration": 0, "values": 4},
    {"gossip": "symmetric", "epoch": 1, "iteration": "0", "values": 4},
    {"gossip": "symmetric", "epoch": None, "iteration": 0, "values": 4},
    {"gossip": "symmetric", "epoch": 1, "iteration": 0, "values": 5},
)
def test_a_visit_that_no_worker_makes_is_refused(header: dict[str, Any]) -> None:
    shown = Snapshots([torch.zeros(4)])
    with pytest.raises(TrainingError, match="expected a visit to 4 values, got"):  # noqa: SIM117
        with connected(shown) as connection:
            connection.send_header(header)


def test_what_is_not_finite_stays_out() -> None:
    values = [torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=torch.float64)]
    shown = Snapshots(values)
    shown.open(1)
    shown.publish(0, values)
    with pytest.raises(TrainingError, match="1 NaN or infinite"):
        asked(shown, 1, 0, lambda: True)


def test_each_neighbour_costs_a_copy_of_the_parameters_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    octets = [0]
    send = Connection.send_values

    def counting(connection: Connection, values: torch.Tensor, *header: Any) -> None:
        if threading.current_thread().name == "sparkdl-port-connection":
            octets[0] += values.nbytes
        send(connection, values, *header)

    monkeypatch.setattr(Connection, "send_values", counting)
    outcome = run_world(job(epochs=1), classification([24] * 4).shards())
    size = sum(parameter.nbytes for parameter in outcome.module.parameters())
    assert octets[0] == 4 * 2 * (6 - 1) * size
