"""How a worker meets the others: a process group, rows to exchange, visits to one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sparkdl.averager.client import AveragerClient
from sparkdl.collective import Collective, join_collective
from sparkdl.collective.network import local_address
from sparkdl.collective.peers import Peers
from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.phases import PhaseClock
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import connect_to
from sparkdl.transport.connection import Connection
from sparkdl.worker.job import Job, Placement


@dataclass(eq=False)
class WorkerLinks:
    """The other workers of a run, as far as the job needs them.

    Attributes:
        job: what is trained.
        placement: where this worker runs.
        averager: knows where the others are.
        token: by which workers prove to each other that they belong to the run.
        address: where others fetch this worker's rows and visit it; None if they never do.
        exchange: exchanges rows to train on; None if there is no such exchange.
        held_out_exchange: exchanges rows to validate with; None if there is no such exchange.
        peers: the others, for a strategy that visits them; None for one that does not.
    """

    job: Job
    placement: Placement
    averager: AveragerClient
    token: str = field(repr=False)
    address: list[Any] | None = field(default=None, init=False)
    exchange: RowExchange | None = field(default=None, init=False)
    held_out_exchange: RowExchange | None = field(default=None, init=False)
    peers: Peers | None = field(default=None, init=False)
    _parts: list[Any] = field(default_factory=list, init=False)

    @contextmanager
    def met(self) -> Iterator[None]:
        """Let the others fetch rows from this worker and visit it for a while, if they ever do."""
        job = self.job
        exchanges_rows = job.feed.exchange_rows or bool(job.feed.reshuffle_every)
        if job.strategy.needs.peers:
            self.peers = Peers(self.placement.rank, self._reach)
        elif not exchanges_rows:
            yield
            return
        visit = None if self.peers is None else self.peers.serve
        address = local_address(self.placement.network)
        with RowServer(address, self.token, job.deadline_s, tls=job.tls, visit=visit) as server:
            self.address = server.address
            if exchanges_rows:
                self.exchange = self._row_exchange(server, held_out=False)
            if job.feed.exchange_rows and job.schema.validation is not None:
                self.held_out_exchange = self._row_exchange(server, held_out=True)
            yield

    def collective(self, clock: PhaseClock) -> AbstractContextManager[Collective | None]:
        """The group of all workers while they train; None if the strategy needs none.

        Args:
            clock: counts the time that its operations take.
        """
        if not self.job.strategy.needs.collective:
            return nullcontext()
        return join_collective(
            self.placement.rank,
            self.averager.gather,
            device=self.placement.device,
            deadline_s=self.job.deadline_s,
            network=self.placement.network,
            clock=clock,
        )

    def _row_exchange(self, server: RowServer, *, held_out: bool) -> RowExchange:
        job, averager = self.job, self.averager
        return RowExchange(
            rank=self.placement.rank,
            server=server,
            token=self.token,
            everyone=partial(self._everyone, held_out=held_out),
            specs=job.schema.stored,
            seed=job.seed,
            deadline_s=job.deadline_s,
            survives=job.survivable_losses > 0,
            on_rows=lambda _: averager.heartbeat(),
            tls=job.tls,
        )

    def _everyone(self, *, held_out: bool) -> Everyone:
        averager = self.averager
        averager.ask_for_rows()
        self._parts = self._parts or averager.ask_for_parts()
        return Everyone.of(self._parts, averager.row_servers, held_out=held_out)

    def _reach(self, rank: int, silence_s: float) -> Connection:
        """Connect to another worker at its current address."""
        self.averager.ask_for_rows()
        found = (rank, self.averager.row_servers, self.placement.rank, self.token, silence_s)
        try:
            return connect_to(*found, encrypted=self.job.tls)
        except StoppedError as error:  # another job may listen there by now
            raise DisconnectedError(str(error)) from error
