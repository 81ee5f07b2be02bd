"""Starts a contender's session as on a machine with or without ``sparkdl-prepare``."""

import sys
from pathlib import Path

import harness

PREPARED = ("sparkdl", "sparkdl_all_reduce")
PREPARE_TIMEOUT_SECONDS = 300.0


def prepare(cache: Path) -> None:
    """Runs ``sparkdl-prepare`` for the sessions of ``PREPARED``; not part of any figure.

    Args:
        cache: a folder that does not exist yet, for what it writes.
    """
    harness.run_to_end(
        [sys.executable, "-c", "from sparkdl.spark.session.prepare import main; main([])"],
        environment=harness.child_environment() | {"XDG_CACHE_HOME": str(cache)},
        timeout=PREPARE_TIMEOUT_SECONDS,
    )


def environment_of(name: str, cache: Path, python: Path = Path(sys.executable)) -> dict[str, str]:
    """Returns the environment of a contender's process.

    Args:
        name: the contender's name.
        cache: as prepared; contenders not in ``PREPARED`` see neither this nor the user's own.
        python: the contender's interpreter.
    """
    seen = cache if name in PREPARED else cache / "nothing"
    return harness.child_environment(python=python) | {"XDG_CACHE_HOME": str(seen)}
