"""Workers that visit each other, one at a time, while all train; nobody waits for anybody.

Each worker has a port at which the others call on it, served by threads beside its training; a
connection stays open between visits. A worker that does not answer is left alone for a while: it
may have been lost, and may be back later at another address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sparkdl.errors import DeadlineError, DisconnectedError
from sparkdl.transport.connection import Connection

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""The longest for which a visit may make no progress, in seconds."""
AWAY_S = 1.0
"""A worker that was not there is left alone for at least this many seconds."""
AWAY_TIMES = 20
"""The same as a multiple of the time that finding out took: at most a twentieth is lost."""

T = TypeVar("T")
Host = Callable[[Connection, dict[str, Any]], None]
"""Serves one visit, given the connection and the header with which it began."""


class Peers:
    """The other workers, as this one calls on them and they call on it.

    Args:
        rank: this worker's rank.
        reach: connects to a rank at its current address, with a limit on its silence in seconds;
            raises ``DisconnectedError`` if it is not there.

    Attributes:
        rank: as given.
        host: serves the others' visits; None while this worker is not to be visited.
    """

    def __init__(self, rank: int, reach: Callable[[int, float], Connection]) -> None:
        self.rank = rank
        self.host: Host | None = None
        self._reach = reach
        self._open: dict[int, Connection] = {}
        self._away_until: dict[int, float] = {}

    def serve(self, connection: Connection, asked: dict[str, Any]) -> None:
        """Serve a connection until it ends; called in a thread of its own.

        Args:
            connection: from another worker.
            asked: the first header received.

        Raises:
            TrainingError: the other end sends something that no worker sends.
            DisconnectedError: the other end has left.
        """
        while True:
            host = self.host
            if host is None:
                connection.send_header({"away": True})
            else:
                host(connection, asked)
            asked = connection.receive_header()

    def visit(self, rank: int, talk: Callable[[Connection], T]) -> T | None:
        """Talk to another worker.

        Args:
            rank: the worker to visit.
            talk: holds the conversation; abandoned midway if the connection breaks.

        Returns:
            What ``talk`` returned; None if the other worker is not there, or was not there
            recently.
        """
        began = time.monotonic()
        if began < self._away_until.get(rank, began):
            return None
        try:
            if rank not in self._open:
                self._open[rank] = self._reach(rank, PATIENCE_S)
            return talk(self._open[rank])
        except (DisconnectedError, DeadlineError) as error:
            # Should it be the averager that is gone, the next heartbeat says so.
            connection = self._open.pop(rank, None)
            if connection is not None:
                connection.close()
            now = time.monotonic()
            away_s = max(AWAY_S, AWAY_TIMES * (now - began))
            self._away_until[rank] = now + away_s
            logger.info(
                "rank %d continues without rank %d for %.0f s: %s", self.rank, rank, away_s, error
            )
            return None

    def close(self) -> None:
        """Hang up on the others, and accept no more visits."""
        self.host = None
        while self._open:
            self._open.popitem()[1].close()
