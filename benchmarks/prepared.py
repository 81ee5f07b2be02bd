"""The kinds of session in which contenders are measured, ours and peers alike.

``plain`` is built by the user; ``created`` comes from ``sparkdl.create_session``, ``prepared`` too,
on a machine on which ``sparkdl-prepare`` was run; ``connect`` is a client of Spark Connect.
"""

import argparse
import sys
from pathlib import Path

import harness

KINDS = ("plain", "created", "prepared", "connect")
PREPARE_TIMEOUT_SECONDS = 300.0


def add_option(options: argparse.ArgumentParser, *, default: str) -> None:
    """Adds ``--session``, which may be given more than once."""
    options.add_argument(
        "--session",
        action="append",
        choices=KINDS,
        help=f"a kind of session for all contenders ({default} if left out)",
    )


def prepare(cache: Path) -> None:
    """Runs ``sparkdl-prepare`` for the prepared sessions; not part of any figure.

    Args:
        cache: a folder that does not exist yet, for what it writes.
    """
    harness.run_to_end(
        [sys.executable, "-c", "from sparkdl.spark.session.prepare import main; main([])"],
        environment=harness.child_environment() | {"XDG_CACHE_HOME": str(cache)},
        timeout=PREPARE_TIMEOUT_SECONDS,
    )


def environment_of(kind: str, cache: Path, python: Path = Path(sys.executable)) -> dict[str, str]:
    """Returns the environment of a contender's process.

    Args:
        kind: of ``KINDS``.
        cache: as prepared; others see neither this nor the user's own.
        python: the contender's interpreter.
    """
    seen = cache if kind == "prepared" else cache / "nothing"
    return harness.child_environment(python=python) | {"XDG_CACHE_HOME": str(seen)}
