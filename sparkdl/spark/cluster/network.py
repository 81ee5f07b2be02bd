"""How workers reach each other, from the application's Spark settings."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from sparkdl.collective import Network
from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.jvm import setting

INTERFACE = "spark.sparkdl.collective.interface"
"""Setting: a network interface (``eth1``) or a subnet (``10.1.0.0/16``)."""
PORTS = "spark.sparkdl.collective.ports"
"""Setting: first and last port on which rank 0 may accept the other workers (``40000-40100``)."""

DRIVER_PORT = "spark.sparkdl.driver.port"
"""Setting: the port on which the driver serves workers (``40000``), or a range of them."""


def driver_ports(spark: SparkSession) -> tuple[int, int] | None:
    """First and last port on which the driver may serve workers; None for any free one."""
    text = (setting(spark, DRIVER_PORT) or "").strip()
    if not text:
        return None
    try:
        return parse_ports(DRIVER_PORT, f"{text}-{text}" if text.isdigit() else text)
    except ConfigError:
        raise ConfigError(
            f"{DRIVER_PORT} must be a port such as 40000, or two such as 40000-40100, got {text!r}"
        ) from None


def network_of(
    spark: SparkSession, *, interface: str | None = None, ports: str | None = None
) -> Network:
    """Read the settings.

    Args:
        spark: the session.
        interface: overrides the setting.
        ports: overrides the setting; first and last port, ``40000-40100``.

    Raises:
        ConfigError: the text is not a range of ports.
    """
    name, text = (PORTS, setting(spark, PORTS)) if ports is None else ("collectivePorts", ports)
    return Network(
        driver=setting(spark, "spark.driver.host") or "127.0.0.1",
        interface=interface or setting(spark, INTERFACE) or None,
        ports=parse_ports(name, text) if text else None,
    )


def parse_ports(name: str, text: object) -> tuple[int, int]:
    """Read a range of ports.

    Args:
        name: what it is called, for the message.
        text: first and last port, ``40000-40100``.

    Raises:
        ConfigError: the text is not a range of ports.
    """
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text) if isinstance(text, str) else None
    if match and 1 <= int(match[1]) <= int(match[2]) <= 65_535:
        return int(match[1]), int(match[2])
    raise ConfigError(f"{name} must be two ports such as '40000-40100', got {text!r}")
