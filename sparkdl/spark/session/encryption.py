"""What Spark's settings demand of connections and disks; met, or refused with an error.

``spark.authenticate`` demands nothing of our own connections, which all require the job's token,
but the ports of gloo, NCCL and torch's TCPStore admit whoever reaches them.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.jvm import is_true

PLAINTEXT = "spark.sparkdl.collective.plaintext"
"""Setting: whether gloo and NCCL may be used despite demands to encrypt or authenticate."""
AUTHENTICATE = "spark.authenticate"
"""The setting that makes Spark's own processes prove that they belong to the application."""
NETWORK_SETTINGS = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.ssl.enabled",
)
"""Any of these settings, if true, makes Spark encrypt connections."""
DISK_SETTING = "spark.io.encryption.enabled"


def encrypts_connections(spark: SparkSession, tls: bool) -> bool:
    """Whether a job's connections must be encrypted, by the user's wish or Spark's settings."""
    return tls or _first_enabled(spark) is not None


def require_trusted_network(spark: SparkSession, tls: bool, who: str) -> None:
    """Check that gloo and NCCL, which neither encrypt nor authenticate, may be used.

    Args:
        spark: the session.
        tls: whether the user wants encryption.
        who: what exchanges over them, for the message.

    Raises:
        ConfigError: encryption or authentication is demanded, and no setting exempts these.
    """
    if is_true(spark, PLAINTEXT):
        return
    if encrypts_connections(spark, tls):
        setting = _first_enabled(spark)
        demand = "tls is True" if setting is None else f"{setting} is true"
        lack, danger = "do not encrypt", "read"
    elif is_true(spark, AUTHENTICATE):
        demand = f"{AUTHENTICATE} is true"
        lack, danger = "accept anyone who reaches their ports", "reach"
    else:
        return
    raise ConfigError(
        f"{demand}, but {who} exchanges over gloo or NCCL, which {lack}. Use "
        "ParameterAveraging(), which exchanges through the driver; or, if nobody else can "
        f"{danger} the network between the executors, set {PLAINTEXT}=true"
    )


def keeps_rows_in_memory(spark: SparkSession, store_in: str = "disk") -> str | None:
    """What demands that rows are never on a disk, in words; None if nothing does.

    Args:
        spark: the session, whose setting says whether disks must be encrypted.
        store_in: the user's wish, ``disk`` or ``memory``.
    """
    if is_true(spark, DISK_SETTING):
        return f"{DISK_SETTING} is true"
    return "storeIn is 'memory'" if store_in == "memory" else None


def _first_enabled(spark: SparkSession) -> str | None:
    return next((name for name in NETWORK_SETTINGS if is_true(spark, name)), None)
