"""The user's script and working directory on a worker: what runs is what was sent."""

from __future__ import annotations

import logging
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.collective.network import Gather
from sparkdl.errors import ConfigError
from sparkdl.user_code.needed_modules import imported_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """A Python file to run as ``__main__``."""

    path: str
    """Where it is on the driver, and perhaps on the executors."""
    source: bytes
    """Its text on the driver."""

    def imports(self) -> set[str]:
        """The dotted names that it imports; none if it is not Python."""
        try:
            code = compile(self.source, self.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):  # the workers will report it
            return set()
        return set(imported_names(code))


def run_script(script: Script, arguments: Sequence[str]) -> None:
    """Run a script in place if the same text is there, else in a directory of its own.

    Args:
        script: what to run.
        arguments: its ``sys.argv`` after the path.

    Raises:
        SystemExit: it exited with a code other than 0.
    """
    before = sys.argv, list(sys.path)
    with ExitStack() as stack:
        path = Path(script.path)
        if not _is_in_place(script):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-")))
            path = folder / path.name
            path.write_bytes(script.source)
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        try:
            with leaving_with_zero():
                runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before


@contextmanager
def leaving_with_zero() -> Iterator[None]:
    """End what it encloses at ``sys.exit(0)`` as at its last line; other codes are errors."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def _is_in_place(script: Script) -> bool:
    path = Path(script.path)
    try:
        if not path.is_file():
            return False
        # The size first: the file there may be large.
        if path.stat().st_size == len(script.source) and path.read_bytes() == script.source:
            return True
    except OSError as error:  # a home directory that only its owner may enter, for example
        logger.warning("%s on %s cannot be read: %s", path, socket.gethostname(), error)
        return False
    logger.warning(
        "%s on %s differs from the driver's, which runs instead, with only the modules that it "
        "imports beside it: update that host's copy",
        path,
        socket.gethostname(),
    )
    return False


def function_of(
    train: Callable[..., Any] | str, kwargs: Mapping[str, Any], name: str
) -> Callable[..., Any] | Script:
    """What the user wants to run.

    Args:
        train: the function, or the path of a script.
        kwargs: its arguments by name.
        name: of the argument that it was passed as.

    Raises:
        ConfigError: it is neither, or a script with arguments by name.
    """
    if callable(train):
        return train
    if not isinstance(train, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a function or the path of a script, got {train!r}")
    path = Path(train)
    if not path.is_file():
        raise ConfigError(
            f"{name} must be a function or the path of a script, and there is no file {path} "
            f"(looked for in {Path.cwd()})"
        )
    if kwargs:
        raise ConfigError(
            f"a script takes no keyword arguments, but was given {', '.join(sorted(kwargs))}. "
            "Pass them as strings, for example '--lr=0.1'"
        )
    return Script(str(path.resolve()), path.read_bytes())


def enter(directory: str | None, required: bool, rank: int, gather: Gather) -> None:
    """Run in a directory if all workers can, else each in its executor's.

    Args:
        directory: the one to run in; None if there is none.
        required: whether the user named it, so that every worker's host must have it.
        rank: this worker's.
        gather: tells all workers what each has found.

    Raises:
        ConfigError: the user named it, and this host does not have it.
    """
    if directory is None:
        return
    can = os.path.isdir(directory) and os.access(directory, os.X_OK)
    if required and not can:
        raise ConfigError(
            f"cwd='{directory}' is not a directory that rank {rank} on "
            f"{socket.gethostname()} can enter. Name one that exists on all executors' hosts, a "
            "shared one if all need the same files"
        )
    found = gather({"host": socket.gethostname(), "enters": can})
    lacking = sorted({str(each["host"]) for each in found if not each["enters"]})
    if not lacking:
        os.chdir(directory)
    elif rank == 0:
        logger.warning(
            "the driver's directory %s does not exist on %s: relative paths start in each "
            "executor's own directory. Set cwd=... to one that all hosts have, or use absolute "
            "paths",
            directory,
            ", ".join(lacking),
        )
