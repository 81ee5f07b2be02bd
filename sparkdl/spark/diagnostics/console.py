"""Shows in the driver what workers print."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Sequence

from pyspark.sql import SparkSession

from sparkdl.arguments import counted
from sparkdl.spark.catalyst.jvm import is_of_connect, setting
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)

_showing = threading.Lock()


class Display:
    """Writes what workers print to the driver's standard output, each line with its rank.

    What cannot be written leads to one warning, and nothing else.

    Args:
        log: where the lines are that are left out, for example "the executor's log".
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._failed = False

    def __call__(self, rank: int, lines: Sequence[str], left_out: int) -> None:
        """Show a rank's lines, and how many were left out after them."""
        shown = [f"[rank {rank}] {line}\n" for line in lines]
        if left_out:
            shown.append(
                f"[rank {rank}] ({counted(left_out, 'line')} left out; {self._log} has them)\n"
            )
        try:
            encoding = sys.stdout.encoding or "utf-8"
            # A character that the driver cannot show, such as an accent under LANG=C, is no error.
            text = "".join(shown).encode(encoding, "backslashreplace").decode(encoding)
            with _showing:
                sys.stdout.write(text)
                sys.stdout.flush()
        except Exception as error:  # a full disk, a reader that is gone, a closed or replaced file
            if not self._failed:
                self._failed = True
                logger.warning(
                    "what the workers print cannot be shown on the driver's standard output: %s; "
                    "%s has it",
                    message_of(error),
                    self._log,
                )


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """The interface that services in the driver bind to, and the host name that workers use."""
    advertised = setting(spark, "spark.driver.host") or "127.0.0.1"
    return setting(spark, "spark.driver.bindAddress") or advertised, advertised


def echoes(spark: SparkSession) -> bool:
    """Whether workers have logs of their own; with a local master they share the driver's."""
    if is_of_connect(spark):
        return True
    return not re.fullmatch(r"local(\[.*\])?", spark.sparkContext.master or "")


def display(spark: SparkSession) -> Display:
    """What shows the lines of a session's workers."""
    return Display("the executor's log" if echoes(spark) else "the driver's standard error")
