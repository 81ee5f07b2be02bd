"""How workers reach each other, from the application's Spark settings."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from sparkdl.collective import Network
from sparkdl.errors import ConfigError

INTERFACE = "spark.sparkdl.collective.interface"
"""Setting: a network interface (``eth1``) or a subnet (``10.1.0.0/16``)."""
PORTS = "spark.sparkdl.collective.ports"
"""Setting: first and last port on which rank 0 may accept the other workers (``40000-40100``)."""


def network_of(spark: SparkSession) -> Network:
    """Read the settings.

    Raises:
        ConfigError: the range of ports is not one.
    """
    conf = spark.sparkContext.getConf()
    return Network(
        driver=conf.get("spark.driver.host") or "127.0.0.1",
        interface=conf.get(INTERFACE) or None,
        ports=_parse_ports(conf.get(PORTS) or ""),
    )


def _parse_ports(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if match and 1 <= int(match[1]) <= int(match[2]) <= 65_535:
        return int(match[1]), int(match[2])
    raise ConfigError(f"{PORTS} must be two ports such as 40000-40100, got '{text}'")
