"""Bytes for executors: in a broadcast variable, or in what Spark Connect has in its place."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.spark.catalyst.core import Broadcast, SparkFiles
from sparkdl.spark.catalyst.jvm import is_of_connect

MOST_IN_A_TASK = 8 << 20
"""The most bytes that travel with the function itself; a Connect server takes 128 MiB at once."""


@dataclass(frozen=True)
class InTask:
    """Bytes that travel with the function that uses them."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class InArtifact:
    """Bytes in a file that the session has sent to its server, which gives it to executors."""

    name: str

    @property
    def value(self) -> bytes:
        """The bytes, in a task."""
        return Path(SparkFiles.get(self.name)).read_bytes()


SentBytes = Broadcast[bytes] | InTask | InArtifact
"""Has the bytes as ``value`` in a task."""


def home_of(spark: SparkSession) -> Any:
    """What executors keep bytes for: the application, or the Connect session."""
    return spark if is_of_connect(spark) else spark.sparkContext


def send(spark: SparkSession, content: bytes) -> SentBytes:
    """Send bytes to the executors of a session."""
    if not is_of_connect(spark):
        return spark.sparkContext.broadcast(content)
    if len(content) <= MOST_IN_A_TASK:
        return InTask(content)
    # Named after what it holds: an artifact cannot be replaced.
    name = f"sparkdl-{hashlib.sha256(content).hexdigest()[:32]}"
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
        path = Path(scratch) / name
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return InArtifact(name)
