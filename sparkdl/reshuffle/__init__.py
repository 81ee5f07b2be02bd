"""Rows from worker to worker: random, equal shards, without the driver or a Spark job."""

from sparkdl.reshuffle.exchange import RowExchange
from sparkdl.reshuffle.server import RowServer

__all__ = ["RowExchange", "RowServer"]
