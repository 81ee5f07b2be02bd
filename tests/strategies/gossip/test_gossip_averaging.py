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
import trainings
from by_keyword import run
from every_row import every
from misbehaving import ranks
from torch import Tensor, nn
from toys import classification, mlp
from trainings import DATA, SIZES
from virtual_time import VirtualClock

from sparkdl.averager import Averager
from sparkdl.averager.client import client
from sparkdl.collective import peers as peers_module
from sparkdl.collective.peers import Peers, Visitors
from sparkdl.errors import DisconnectedError
from sparkdl.strategies import GossipAveraging, ParameterAveraging
from sparkdl.strategies.gossip.shown import Shown
from sparkdl.testing import run_world
from sparkdl.transport.connection import Connection

cloudpickle.register_pickle_by_value(misbehaving)

MODES = ["push", "pull", "push_pull"]


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
def test_it_learns_counts_rows_once_and_moves_the_bytes_of_the_formula(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = Visits(monkeypatch)
    given = job(strategy=GossipAveraging(period=2, mode=mode, topology="ring"))
    outcome = run_world(given, DATA.shards())
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss
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


@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["random", "ring", "exponential"])
@pytest.mark.parametrize("mode", MODES)
def test_over_ten_seeds_losses_stay_in_a_band(mode: Any, topology: Any) -> None:
    ratios = []
    for seed in range(10):
        data = classification([40, 40, 40, 40], seed=seed)
        losses = [
            run_world(job(mlp(seed=seed), strategy=strategy, epochs=4), data.shards())
            .history[-1]
            .loss
            for strategy in (
                GossipAveraging(2, mode, topology),
                ParameterAveraging(2, average_optimizer_state=False),
            )
        ]
        ratios.append(losses[0] / losses[1])
    assert 0.8 < min(ratios) <= max(ratios) < 1.25
    assert np.mean(ratios) == pytest.approx(1, abs=0.1)


def test_who_is_not_there_is_skipped_at_once_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(peers_module.time, "monotonic", lambda: now)
    tried: list[int] = []

    def reach(rank: int, silence_s: float) -> Connection:
        tried.append(rank)
        raise DisconnectedError("no route")

    others = Peers(0, reach, Visitors())
    for seconds in (0.0, 0.5, 0.9):
        now = 100.0 + seconds
        assert others.visit(1, lambda there: True) is None
    assert tried == [1]
    now = 101.1
    assert others.visit(1, lambda there: True) is None
    assert others.visit(2, lambda there: True) is None
    assert tried == [1, 1, 2]


def test_who_is_lost_in_the_middle_of_a_visit_is_called_again_when_it_is_back() -> None:
    class Closable:
        closed = False

        def close(self) -> None:
            self.closed = True

    connections = [Closable(), Closable()]
    waiting = list(connections)
    others = Peers(0, lambda rank, silence_s: waiting.pop(0), Visitors())  # type: ignore[arg-type, return-value]

    def break_off(connection: object) -> bool:
        raise DisconnectedError("gone")

    assert others.visit(1, break_off) is None
    assert connections[0].closed
    others._away_until.clear()
    assert others.visit(1, lambda connection: connection is connections[1]) is True
    others.close()
    assert connections[1].closed


def test_an_epoch_may_be_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver hears of who trains, though no values come."""
    monkeypatch.setattr(client, "READING_S", 0.0)
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
