"""Bytes for executors: in a broadcast variable, or in what Spark Connect has in its place."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pyspark import cloudpickle as spark_cloudpickle
from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.broadcasts import broadcast, destroy
from sparkdl.spark.catalyst.jvm import Broadcast, SparkFiles, is_of_connect, setting

PIECE_BYTES = 8 << 20
"""The size of the files in which more travels: what has changed changes few of them."""
MOST_IN_A_TASK = 8 << 20
"""The most bytes that travel with the function itself, which Spark sends again with each task."""
MOST_WITHOUT_FILES = 96 << 20
"""The same where a Connect server shares files; it takes 128 MiB at once."""
MOST_IN_A_COMMAND = 1 << 20
"""The same in a driver, where PySpark broadcasts larger functions and leaves their files behind."""
ISOLATION = "spark.sql.artifact.isolation.enabled"
"""A setting of a Connect server: whether each session has files of its own.

PySpark switches it off, so it is off where a PySpark program has started the server. All jobs of
all sessions then fetch all files, and fail once a session that has sent some has ended, or a copy
that Spark has made of it to cache a frame.
"""

_arrived: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The files that each Connect session has sent to its server, which keeps them as long as it."""


@dataclass(frozen=True)
class InPieces:
    """Bytes that travel with the function that uses them.

    Attributes:
        files: names of files with the first of them, which the session has sent to its server,
            which gives them to executors.
        rest: the others.
    """

    files: tuple[str, ...]
    rest: bytes = field(repr=False)

    @property
    def value(self) -> bytes:
        """The bytes, in a task."""
        found = (Path(SparkFiles.get(name)).read_bytes() for name in self.files)
        return b"".join((*found, self.rest))


SentBytes = Broadcast[bytes] | InPieces
"""Has the bytes as ``value`` in a task."""

# A task says which package an executor lacks, and needs this before.
spark_cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


def broadcast_scope(spark: SparkSession) -> Any:
    """What executors keep bytes for: the application, or the Connect session."""
    return spark if is_of_connect(spark) else spark.sparkContext


def send(spark: SparkSession, content: bytes) -> SentBytes:
    """Send bytes to the executors of a session, for as long as anything there refers to them.

    Raises:
        ConfigError: they are too many for a Connect server that shares files among its sessions.
    """
    if is_of_connect(spark):
        return _in_pieces(spark, content)
    return broadcast(spark.sparkContext, content)


@contextmanager
def lent(spark: SparkSession, content: bytes) -> Iterator[SentBytes]:
    """Send bytes to the executors of a driver, for jobs that end within a ``with`` block."""
    if len(content) <= MOST_IN_A_COMMAND:
        yield InPieces((), content)
        return
    sent = broadcast(spark.sparkContext, content)
    try:
        yield sent
    finally:
        destroy(sent)


def _in_pieces(spark: SparkSession, content: bytes) -> InPieces:
    if len(content) > MOST_IN_A_TASK and setting(spark, ISOLATION) == "false":
        if len(content) > MOST_WITHOUT_FILES:
            raise ConfigError(
                f"{len(content) / 1e6:.0f} MB are to be sent to the executors. Over Spark Connect, "
                f"more than {MOST_WITHOUT_FILES / 1e6:.0f} MB travel as files of the session, but "
                f"on this server {ISOLATION} is false: files are shared among sessions, and when "
                "one of those ends, all others' jobs fail. Start the server with "
                f"{ISOLATION}=true, as sbin/start-connect-server.sh does"
            )
        return InPieces((), content)
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    rest = pieces.pop() if pieces and len(pieces[-1]) <= MOST_IN_A_TASK else b""
    # Named after what they hold: an artifact cannot be replaced.
    names = [f"sparkdl-{hashlib.sha256(piece).hexdigest()[:32]}" for piece in pieces]
    known = _arrived.setdefault(spark, set())
    new = {name: piece for name, piece in zip(names, pieces, strict=True) if name not in known}
    if new:
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
            for name, piece in new.items():
                Path(scratch, name).write_bytes(piece)
            spark.addArtifacts(*(str(Path(scratch, name)) for name in new), file=True)
        known.update(new)
    return InPieces(tuple(names), rest)
