"""How a worker meets the others: a process group, rows to exchange, visits to one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from sparkdl.averager.client.client import AveragerClient
from sparkdl.collective import Collective, join_collective
from sparkdl.collective.network import local_address
from sparkdl.collective.peers import PeerAwayError, Peers, Visitors
from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.phases import PhaseClock
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import Peer
from sparkdl.transport.connection import Connection
from sparkdl.worker.job import Job, Placement


class WorkerLinks:
    """The other workers of a run, as far as the job needs them.

    Args:
        job: what is trained.
        placement: where this worker runs.
        averager: knows where the others are.
        token: by which workers prove to each other that they belong to the run.

    Attributes:
        address: where others fetch this worker's rows and visit it; None if they never do.
        exchange: exchanges rows to train on; None if there is no such exchange.
        held_out_exchange: exchanges rows to validate with; None if there is no such exchange.
        peers: the others, for a strategy that visits them; None for one that does not.
    """

    def __init__(
        self, job: Job, placement: Placement, averager: AveragerClient, token: str
    ) -> None:
        self._job = job
        self._placement = placement
        self._averager = averager
        self._token = token
        self.address: list[Any] | None = None
        self.exchange: RowExchange | None = None
        self.held_out_exchange: RowExchange | None = None
        self.peers: Peers | None = None

    @contextmanager
    def met(self) -> Iterator[None]:
        """Let the others fetch rows from this worker and visit it for a while, if they ever do."""
        job, visitors = self._job, Visitors()
        exchanges_rows = job.feed.exchange_rows or bool(job.feed.reshuffle_every)
        if job.strategy.needs.peers:
            self.peers = Peers(self._placement.rank, self._reach, visitors)
        elif not exchanges_rows:
            yield
            return
        visit = visitors.serve if job.strategy.needs.peers else None
        address = local_address(self._placement.network)
        with RowServer(address, self._token, job.deadline_s, tls=job.tls, visit=visit) as server:
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
        if not self._job.strategy.needs.collective:
            return nullcontext()
        return join_collective(
            self._placement.rank,
            self._averager.gather,
            device=self._placement.device,
            deadline_s=self._job.deadline_s,
            network=self._placement.network,
            clock=clock,
        )

    def _row_exchange(self, server: RowServer, *, held_out: bool) -> RowExchange:
        job, averager = self._job, self._averager
        return RowExchange(
            rank=self._placement.rank,
            server=server,
            token=self._token,
            everyone=partial(self._everyone, held_out=held_out),
            specs=job.schema.stored,
            seed=job.seed,
            deadline_s=job.deadline_s,
            survives=job.survivable_losses > 0,
            on_rows=averager.report_reading,
            tls=job.tls,
        )

    def _everyone(self, *, held_out: bool) -> Everyone:
        averager = self._averager
        averager.ask_for_rows()
        rows = averager.held_out_rows if held_out else averager.shard_rows
        return Everyone(rows, averager.row_servers)

    def _reach(self, rank: int, silence_s: float) -> Connection:
        """Connect to another worker at its current address."""
        self._averager.ask_for_rows()
        peer = Peer.of(rank, self._averager.row_servers, encrypted=self._job.tls)
        try:
            return peer.connect(self._placement.rank, self._token, silence_s)
        except (DisconnectedError, StoppedError) as error:  # another job may listen there by now
            raise PeerAwayError(str(error)) from error
