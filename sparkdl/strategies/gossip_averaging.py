"""Gossip: each worker mixes its parameters with those of one other at a time, never with all.

Jin et al. 2016, "How to scale distributed deep learning?" (gossiping SGD), and Lian et al. 2017 and
2018 (decentralized SGD, D-PSGD, and its asynchronous form, AD-PSGD).

A visit multiplies the workers' parameters by a mixing matrix W. In ``push_pull`` it is symmetric
and preserves the workers' mean, like D-PSGD's, of which this is the asynchronous form. The distance
of replicas from their mean shrinks with W's second largest eigenvalue l: for random pairs of n
workers, its square shrinks by l = 1 - 1 / (n - 1) per visit, in expectation (Boyd et al. 2006,
"Randomized Gossip Algorithms"). Nobody waits: x_j is what j last showed, which is what it had when
it last called on a worker, as changed by visitors since; what it learns meanwhile is added.
``gossip_values`` has the exchange itself, ``gossip_lockstep`` that of ``symmetric``.

At the end of an epoch the driver forms the mean of all replicas, weighted by rows, from which all
begin the next one; this mean is validated and saved. (In the papers there is none before the end of
the training.) Integer buffers are each worker's own until then; the optimizer's state stays with
the workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparkdl.averager.values.replica_codec import require_finite
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.collective.peers import AWAY_TIMES, PATIENCE_S
from sparkdl.protocols import Batch
from sparkdl.strategies.arguments import STEPS, argument, one_of
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.gossip_lockstep import Snapshots, lead_of, neighbors_of
from sparkdl.strategies.gossip_values import MODES, Shown
from sparkdl.transport.connection import Connection

SYMMETRIC = "symmetric"
TOPOLOGIES = ("random", "ring", "exponential")


@dataclass(frozen=True)
class GossipAveraging(Strategy["_Either"]):
    """Mix with one other worker after steps p, 2p, ...; all with all at the end of each epoch.

    Rule:
        After every ``period`` local steps, worker i calls on worker j, chosen by the topology::

            pull        x_i  <-  (x_i + x_j) / 2
            push        x_j  <-  its mean with all that came since it last called on a worker
            push_pull   x_i, x_j  <-  (x_i + x_j) / 2

        and in ``symmetric`` (D-PSGD) on all its neighbours at once, while they do the same::

            x_i  <-  sum_j W_ij x_j        W_ij = 1 / (1 + neighbours of j)

    Phases:
        1. A worker trains for ``period`` steps by itself.
        2. It adds what it has learned to what it shows, which visitors have mixed meanwhile.
        3. It calls on another, or on all its neighbours: it sends its parameters, is sent theirs,
           or both. Only in ``symmetric`` does it wait; absent workers are skipped.
        4. It goes on from what it then shows.
        5. When the epoch ends, each sends its parameters to the driver, waits for the mean of all,
           weighted by rows, and goes on from it. That mean is validated.

    When:
        For many workers of differing speeds with a fast network between them, where neither the
        driver's link nor the slowest worker should set the pace.

    When not:
        For few workers, nor where two fits must give the same bits or accuracy is all that counts:
        averaging is better in each case.

    The others go on without a lost worker, and skip it until it is back and starts its epoch over.
    The driver sees no values within an epoch, so a worker loses at most its own epoch.

    Args:
        period: local steps between two visits, >= 1; 1 in the papers.
        mode: ``push_pull`` preserves the mean, at twice the bytes of the others. With ``pull`` and
            ``push`` (Jin et al.) a worker that many call on counts for more. ``symmetric`` is
            D-PSGD: in each iteration a worker waits for its neighbours' parameters and mixes with
            all of them, so that two fits give the same bits, and a slow worker slows down its
            neighbours.
        topology: whom a worker calls on. ``random`` draws anyone, and mixes fastest without a plan;
            ``ring`` takes the two neighbours in turn, which needs few connections, and mixes slowly
            beyond some ten workers; ``exponential`` takes workers 1, 2, 4, ... ranks further on
            (Assran et al. 2019, "Stochastic Gradient Push", where log2(n) iterations mix n workers
            as all exchange at once; visits one at a time mix no better than ``random`` ones). In
            ``symmetric`` mode, being neighbours is mutual: two on a ``ring``, two on a ring redrawn
            in each iteration for ``random``, and all of them for ``exponential``.

    Raises:
        ConfigError: an argument is out of range.
    """

    period: int = argument(1, STEPS)
    mode: Literal["push", "pull", "push_pull", "symmetric"] = argument(
        "push_pull", one_of(*MODES, SYMMETRIC)
    )
    topology: Literal["random", "ring", "exponential"] = argument("random", one_of(*TOPOLOGIES))

    needs = Needs(exchanges_optimizer_state=False, peers=True)
    wire_format = FULL_PRECISION

    def start(self, run: Run) -> _Either:
        """Begin at the center, and accept visits."""
        return (_LockStep if self.mode == SYMMETRIC else _Visiting)(run, self)

    def train_epoch(self, run: Run, state: _Either, batches: Iterable[Batch]) -> None:
        """Show the others the values that an epoch begins with, and train."""
        state.open(run)
        super().train_epoch(run, state, batches)

    def after_step(self, run: Run, state: _Either, batch: Batch) -> None:
        """Call on another worker after every ``period`` steps."""
        run.averager.heartbeat()
        if run.step_of_epoch % self.period == 0 and not batch.last:
            state.mix(run, iteration=run.step_of_epoch // self.period - 1)

    def end_epoch(self, run: Run, state: _Either) -> None:
        """Contribute the worker's values, and take the mean of all."""
        state.close(run)
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=True))


def peer_of(topology: str, rank: int, world_size: int, epoch: int, iteration: int) -> int:
    """Whom a worker calls on.

    Args:
        topology: one of ``TOPOLOGIES``.
        rank: of the worker.
        world_size: how many there are, > 1.
        epoch: counted from 1.
        iteration: visits of the epoch before this one.

    Returns:
        Another rank.
    """
    if topology == "ring":
        hop = 1 if iteration % 2 == 0 else world_size - 1
    elif topology == "exponential":
        hop = 1 << iteration % (world_size - 1).bit_length()
    else:
        hop = random.Random(f"{epoch} {iteration} {rank}").randrange(1, world_size)
    return (rank + hop) % world_size


class _Gossip:
    """One worker's part, while its replica holds the center.

    Args:
        run: the worker's.
        strategy: whom it mixes with, and when.
    """

    _kind: ClassVar[type[Shown | Snapshots]]

    def __init__(self, run: Run, strategy: GossipAveraging) -> None:
        assert run.peers is not None
        self._peers = run.peers
        self._strategy = strategy
        layout = run.replica.layout(with_optimizer=False)
        self._mixed = [index for index, segment in enumerate(layout) if segment.averaged]
        self._shown: Any = self._kind(
            [
                values.detach().to("cpu", layout[index].center_dtype)
                for index, values in zip(self._mixed, self._mine(run), strict=True)
            ]
        )
        run.cleanup.callback(self._peers.close)
        self._peers.host = self._shown.host

    def _finite(self, run: Run) -> list[Tensor]:
        """The worker's values, checked to be finite before others see them."""
        mine = self._mine(run)
        for values in mine:
            require_finite(values, run.window())
        return mine

    def _mine(self, run: Run) -> list[Tensor]:
        segments = run.replica.segments(with_optimizer=False)
        return [segments[index] for index in self._mixed]


class _Visiting(_Gossip):
    """Calls on one other worker in an iteration, and waits for nobody."""

    _kind = Shown

    def open(self, run: Run) -> None:
        """Begin an epoch."""
        self._shown.open(run.epoch, self._mine(run))

    def mix(self, run: Run, iteration: int) -> None:
        """Call on another worker, unless there is none."""
        strategy = self._strategy
        self._shown.publish(self._finite(run), last=False)
        if run.world_size > 1:
            peer = peer_of(strategy.topology, run.rank, run.world_size, run.epoch, iteration)
            self._peers.visit(peer, lambda there: self._shown.visit(there, strategy.mode))
        self._shown.adopt(self._mine(run))

    def close(self, run: Run) -> None:
        """End an epoch with what the worker has learned and what others have made of it."""
        self._shown.publish(self._finite(run), last=True)
        self._shown.adopt(self._mine(run))


class _LockStep(_Gossip):
    """Mixes with all neighbours of an iteration, and waits for them while they are on their way."""

    _kind = Snapshots

    def open(self, run: Run) -> None:
        """Begin an epoch."""
        self._shown.open(run.epoch, lead_of(self._strategy.topology, run.world_size))
        self._began = time.monotonic()

    def mix(self, run: Run, iteration: int) -> None:
        """Take a part of each neighbour's values, or of its own in place of an absent one's."""
        mine = self._finite(run)
        patience_s = max(PATIENCE_S, AWAY_TIMES * (time.monotonic() - self._began))
        self._shown.await_visits(iteration, self._patience(run, patience_s))
        shown = self._shown.publish(iteration, mine)
        peers = neighbors_of(
            self._strategy.topology, run.rank, run.world_size, run.epoch, iteration
        )
        for peer in peers:
            patience = self._patience(run, patience_s)

            def talk(there: Connection, waits: Callable[[], bool] = patience) -> bool:
                return bool(self._shown.visit(there, run.epoch, iteration, waits))

            if self._peers.visit(peer, talk):
                weight = 1 / (1 + len(peers))
                for values, own, other in zip(mine, shown, self._shown.room, strict=True):
                    values.add_(other.sub_(own).to(values), alpha=weight)
        self._began = time.monotonic()

    @staticmethod
    def _patience(run: Run, seconds: float) -> Callable[[], bool]:
        until = time.monotonic() + seconds

        def waits() -> bool:
            run.averager.heartbeat()
            time.sleep(0.01)  # a worker that has yet to start answers at once
            return time.monotonic() < until

        return waits

    def close(self, run: Run) -> None:
        """End an epoch; neighbours may still be at the worker's last iteration."""
        self._finite(run)
        self._shown.end()


_Either = _Visiting | _LockStep
