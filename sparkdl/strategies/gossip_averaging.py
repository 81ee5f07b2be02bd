"""Gossip: each worker mixes its parameters with one other's at a time, and nobody with everyone's.

Jin et al. 2016, "How to scale distributed deep learning?" (gossiping SGD), and Lian et al. 2017 and
2018 (decentralized SGD, D-PSGD, and its asynchronous form, AD-PSGD). After every ``period`` local
steps worker i calls on worker j, whom the topology names:

    pull        x_i  <-  (x_i + x_j) / 2
    push        x_j  <-  its mean with all that came since it last called on somebody itself
    push_pull   x_i, x_j  <-  (x_i + x_j) / 2

A visit multiplies the workers' parameters by a mixing matrix W. In ``push_pull`` it is symmetric
and leaves the workers' mean where it is, as D-PSGD's: this is its asynchronous form. The distance
of replicas from their mean shrinks with W's second largest eigenvalue l: for random pairs of n
workers its square by l = 1 - 1 / (n - 1) a visit, in expectation (Boyd et al. 2006, "Randomized
Gossip Algorithms"). Nobody waits: x_j is what j has shown last, which is what it had when it last
called on somebody and what visitors have made of that; what it learns meanwhile is added.
``gossip`` has the exchange itself.

At the end of an epoch the driver forms the mean of all replicas, weighted by rows, with which all
begin the next one: it is what is validated and saved. Integer buffers are each worker's own until
then; the optimizer's state stays with the workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparkdl.averager.finite import require_finite
from sparkdl.averager.wire_format import FullPrecision, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.gossip import MODES, Shown

TOPOLOGIES = ("random", "ring", "exponential")


@dataclass(frozen=True)
class GossipAveraging(Strategy["_Gossip"]):
    """Mix with one other worker after steps p, 2p, ...; all with all at the end of each epoch.

    Choose it for many workers of differing speeds with a fast network between them, where neither
    the driver's link nor the slowest worker should set the pace. Do not for few workers, nor where
    two fits have to give the same bits or accuracy is all: averaging is better on each.

    A worker that is lost is done without, and begins its epoch anew when it is back; others skip it
    until then. In an epoch the driver sees no values: it is the most that is lost with a worker.

    Args:
        period: local steps between two visits, >= 1; 1 in the papers.
        mode: ``push_pull`` conserves the mean, for twice the bytes of the others. With ``pull`` and
            ``push`` (Jin et al.) a worker that many call on counts for more.
        topology: whom a worker calls on. ``random`` draws anyone, and mixes fastest without a plan;
            ``ring`` takes both neighbours in turn, of whom there are few connections, and mixes
            slowly beyond some ten workers; ``exponential`` takes who is 1, 2, 4, ... ranks further
            (Assran et al. 2019, "Stochastic Gradient Push"): log2(n) turns mix n workers.

    Raises:
        ConfigError: an argument is out of range.
    """

    period: int = 1
    mode: Literal["push", "pull", "push_pull"] = "push_pull"
    topology: Literal["random", "ring", "exponential"] = "random"

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise ConfigError(f"period must be a whole number >= 1 of steps, got {self.period!r}")
        for name, known in (("mode", MODES), ("topology", TOPOLOGIES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    @property
    def needs(self) -> Needs:
        """The other workers, one by one; each keeps its own optimizer's state."""
        return Needs(exchanges_optimizer_state=False, peers=True)

    @property
    def wire_format(self) -> WireFormat:
        """Values, as they are."""
        return FullPrecision()

    def start(self, run: Run) -> _Gossip:
        """Begin at the center, and be visited."""
        return _Gossip(run, self)

    def train_epoch(self, run: Run, state: _Gossip, batches: Iterable[Batch]) -> None:
        """Show the others what an epoch begins with, and train."""
        state.open(run)
        super().train_epoch(run, state, batches)

    def after_step(self, run: Run, state: _Gossip, batch: Batch) -> None:
        """Call on another worker after every ``period`` steps."""
        run.averager.give_sign_of_life()
        if run.step_of_epoch % self.period == 0 and not batch.last:
            state.mix(run, turn=run.step_of_epoch // self.period - 1)

    def end_epoch(self, run: Run, state: _Gossip) -> None:
        """Contribute what the worker has come to, and take the mean of all."""
        state.close(run)
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=True))


def peer_of(topology: str, rank: int, world_size: int, epoch: int, turn: int) -> int:
    """Whom a worker calls on.

    Args:
        topology: one of ``TOPOLOGIES``.
        rank: of the worker.
        world_size: how many there are, > 1.
        epoch: counted from 1.
        turn: visits of the epoch before this one.

    Returns:
        Another rank.
    """
    if topology == "ring":
        hop = 1 if turn % 2 == 0 else world_size - 1
    elif topology == "exponential":
        hop = 1 << turn % (world_size - 1).bit_length()
    else:
        hop = random.Random(f"{epoch} {turn} {rank}").randrange(1, world_size)
    return (rank + hop) % world_size


class _Gossip:
    """One worker's part.

    Args:
        run: the worker's; its replica holds the center.
        strategy: whom it calls on, and what for.
    """

    def __init__(self, run: Run, strategy: GossipAveraging) -> None:
        assert run.peers is not None
        self._peers = run.peers
        self._strategy = strategy
        layout = run.replica.layout(with_optimizer=False)
        self._mixed = [index for index, segment in enumerate(layout) if segment.averaged]
        copies = zip(self._mixed, self._mine(run), strict=True)
        self._shown = Shown(
            [values.detach().to("cpu", layout[index].center_dtype) for index, values in copies]
        )
        run.cleanup.callback(self._peers.close)
        self._peers.visitors.host = self._shown.host

    def open(self, run: Run) -> None:
        """Begin an epoch."""
        self._shown.open(run.epoch, self._mine(run))

    def mix(self, run: Run, turn: int) -> None:
        """Call on another worker, unless there is none."""
        strategy = self._strategy
        self._publish(run, last=False)
        if run.world_size > 1:
            peer = peer_of(strategy.topology, run.rank, run.world_size, run.epoch, turn)
            self._peers.visit(peer, lambda there: self._shown.visit(there, strategy.mode))
        self._shown.adopt(self._mine(run))

    def close(self, run: Run) -> None:
        """End an epoch with what the worker has learned and what others have made of it."""
        self._publish(run, last=True)
        self._shown.adopt(self._mine(run))

    def _publish(self, run: Run, *, last: bool) -> None:
        mine = self._mine(run)
        for values in mine:
            require_finite(values, run.window())
        self._shown.publish(mine, last=last)

    def _mine(self, run: Run) -> list[Tensor]:
        segments = run.replica.segments(with_optimizer=False)
        return [segments[index] for index in self._mixed]
