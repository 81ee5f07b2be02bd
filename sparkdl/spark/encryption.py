"""What Spark's settings demand of connections and disks; kept, or refused in words.

``spark.authenticate`` needs nothing here: no connection of ours is without the job's token.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError

PLAINTEXT = "spark.sparkdl.collective.plaintext"
"""Setting: whether gloo and NCCL may be used where connections are to be encrypted."""
NETWORK_SETTINGS = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.ssl.enabled",
)
"""Any of them, if true, makes Spark encrypt connections."""
DISK_SETTING = "spark.io.encryption.enabled"
MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""


def encrypts_connections(spark: SparkSession, tls: bool) -> bool:
    """Whether a job's connections have to be encrypted: by the user's wish or Spark's settings."""
    return tls or _first_enabled(spark) is not None


def require_no_plaintext(spark: SparkSession, tls: bool, who: str) -> None:
    """Check that nothing that has to be encrypted would travel over gloo or NCCL, which cannot.

    Args:
        spark: the session.
        tls: whether the user wants encryption.
        who: exchanges over them, for the message.

    Raises:
        ConfigError: encryption is demanded, and nobody has said that these are an exception.
    """
    if not encrypts_connections(spark, tls) or _is_true(spark, PLAINTEXT):
        return
    setting = _first_enabled(spark)
    demand = "tls is True" if setting is None else f"{setting} is true"
    raise ConfigError(
        f"{demand}, but {who} exchanges over gloo or NCCL, which do not encrypt. Use "
        "ParameterAveraging(), which exchanges through the driver; or, if nobody else can read "
        f"the network between the executors, set {PLAINTEXT}=true"
    )


def encrypts_disks(spark: SparkSession) -> bool:
    """Whether nothing of the rows may be written to a disk as it is."""
    return _is_true(spark, DISK_SETTING)


def directory_in_memory() -> Path:
    """Where a worker keeps its rows if they must not be on a disk.

    Raises:
        ConfigError: there is no such place on this host.
    """
    if not os.path.ismount(MEMORY) or not os.access(MEMORY, os.W_OK):
        raise ConfigError(
            f"{DISK_SETTING} is true, so that rows may be kept in memory only, but {MEMORY} is no "
            "file system that this process can write to. Mount one there, or set it to false"
        )
    return MEMORY


def _first_enabled(spark: SparkSession) -> str | None:
    return next((name for name in NETWORK_SETTINGS if _is_true(spark, name)), None)


def _is_true(spark: SparkSession, name: str) -> bool:
    return (spark.sparkContext.getConf().get(name) or "false").lower() == "true"
