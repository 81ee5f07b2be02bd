"""Where the user's relative paths start on the workers: in one directory for all of them."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

from sparkdl.collective.rendezvous import Gather
from sparkdl.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Directory:
    """The directory in which the workers run.

    Attributes:
        path: its path; None if there is none.
        required: whether the user named it, so that every worker's host must have it.
    """

    path: str | None
    required: bool

    @classmethod
    def of_driver(cls, wanted: str | os.PathLike[str] | None) -> Directory:
        """The directory that the user named, or the driver's own.

        Args:
            wanted: what the user named; None for the driver's own.
        """
        if wanted is not None:
            return cls(os.path.abspath(wanted), True)
        try:
            return cls(os.getcwd(), False)
        except OSError:  # it was deleted
            return cls(None, False)


def enter(directory: Directory, rank: int, gather: Gather) -> None:
    """Run in a directory if all workers can, else each in its executor's.

    Args:
        directory: the one to run in.
        rank: this worker's.
        gather: tells all workers what each has found.

    Raises:
        ConfigError: the user named it, and this host does not have it.
    """
    if directory.path is None:
        return
    can = os.path.isdir(directory.path) and os.access(directory.path, os.X_OK)
    if directory.required and not can:
        raise ConfigError(
            f"cwd='{directory.path}' is not a directory that rank {rank} on "
            f"{socket.gethostname()} can enter. Name one that exists on all executors' hosts, a "
            "shared one if all need the same files"
        )
    found = gather({"host": socket.gethostname(), "enters": can})
    lacking = sorted({str(each["host"]) for each in found if not each["enters"]})
    if not lacking:
        os.chdir(directory.path)
    elif rank == 0:
        logger.warning(
            "the driver's directory %s does not exist on %s: relative paths start in each "
            "executor's own directory. Set cwd=... to one that all hosts have, or use absolute "
            "paths",
            directory.path,
            ", ".join(lacking),
        )
