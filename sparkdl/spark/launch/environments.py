"""Whether the executors have the driver's Python, torch and sparkdl; an error in words if not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, get_type_hints

import torch
from pyspark import cloudpickle as spark_cloudpickle
from pyspark.serializers import CloudPickleSerializer

from sparkdl.errors import SetupError, SparkDLError
from sparkdl.spark.launch import bootstrap
from sparkdl.version import __version__

_NEEDED_BY_PYSPARK = re.compile(
    r"No module named '(?:pyarrow|pandas|numpy)'|(?:PyArrow|Pandas) >= [\d.]+ must be installed"
)
"""How PySpark words it when a package is missing before our own code can check."""
_OTHER_PYTHON = re.compile(
    r"Python in worker has different version:? \(?(?P<there>\d+(?:\.|, )\d+)\)? "
    r"than that in driver:? (?P<here>\d+\.\d+)"
)
"""How PySpark words it, from 3.5 on, when the minor versions differ."""
_NO_PYTHON = re.compile(
    r'Cannot run program "(?P<path>[^"]+)": error=\d+, (?P<why>[^\n]+)\n'
    r"(?:\s+at java[^\n]*\n)*\s+at org\.apache\.spark\.api\.python\.PythonWorkerFactory"
)
"""How a task fails when its executor finds no interpreter to start."""
_PLACE = re.compile(r"\((\S+) executor \w+\)")

# What is in that module must run on executors that cannot import it.
spark_cloudpickle.register_pickle_by_value(bootstrap)  # type: ignore[no-untyped-call]


def sparkdl_version() -> dict[str, str]:
    """The version that a task requires of this package; see ``bootstrap.require``."""
    return {"sparkdl": __version__}


def torch_version() -> dict[str, str]:
    """The version that a task requires of torch.

    Builds (CPU or CUDA) and patch releases may differ: a driver often has no GPU.
    """
    return {"torch": str(torch.__version__)}


def task_of(entry: str, *arguments: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task runs; see ``bootstrap.make_task``. torch's version follows the arguments."""
    return bootstrap.make_task(entry, (*arguments, torch_version()), sparkdl_version())


def checked(function: Callable[[Iterator[Any]], Iterator[Any]]) -> Any:
    """The same function of batches, for a task; it compares the versions before it is unpickled.

    Args:
        function: as for ``mapInArrow``, or as for a UDF, whose annotations say which kind it is.
    """
    held = _Held(function)

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        yield from held(batches)

    if isinstance(function, FunctionType):
        call.__name__ = function.__name__  # which names the column
        hints = get_type_hints(function)
        call.__annotations__ = {name: hints[name] for name in ("batches", "return")}
    return call


@dataclass(frozen=True)
class _Held:
    """A function that becomes itself again in a task, if the versions are the driver's."""

    function: Callable[[Iterator[Any]], Iterator[Any]]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _told_shortly(self.function, batches)

    def __reduce__(self) -> tuple[Any, ...]:
        # Within Spark's own pickling, which notes the broadcast variables of both.
        function = partial(_told_shortly, self.function)
        data = CloudPickleSerializer().dumps(function)  # type: ignore[no-untyped-call]
        return bootstrap.opened, (data, sparkdl_version() | torch_version())


def _told_shortly(
    function: Callable[[Iterator[Any]], Iterator[Any]], batches: Iterator[Any]
) -> Iterator[Any]:
    try:
        yield from function(batches)
    except SparkDLError as error:  # its text says all; Spark would show our frames above it
        raise error.with_traceback(None) from None


def setup_error(text: str, host: Callable[[], str | None] = lambda: None) -> SetupError | None:
    """What Spark's message for a failed job says about the Python of its executors.

    Args:
        text: the whole message.
        host: finds out where a task has failed, if the message does not say it.

    Returns:
        The error to raise in its place; None if the job failed for another reason.
    """
    start = text.find(bootstrap.MARKER)
    if start >= 0:
        return SetupError(text[start:].splitlines()[0])
    if lacking := _NEEDED_BY_PYSPARK.search(text):
        return SetupError(
            f"the Python on the executors lacks what PySpark itself needs: {lacking[0]}. The "
            f"driver's Python is {sys.executable}: point PYSPARK_PYTHON at one like it before "
            "the session is created (sparkdl.create_session does), or install the driver's "
            "packages there"
        )
    if other := _OTHER_PYTHON.search(text):
        where, there = _executor(text, host), other["there"].replace(", ", ".")
        return SetupError(
            f"{where} runs Python {there}, but the driver Python {other['here']}, and "
            "PySpark needs the same minor version: point PYSPARK_PYTHON at a Python "
            f"{other['here']} there before the session is created"
        )
    if absent := _NO_PYTHON.search(text):
        return SetupError(_no_python(_executor(text, host), absent["path"], absent["why"]))
    return None


def _executor(text: str, host: Callable[[], str | None]) -> str:
    place = _PLACE.search(text)
    found = place[1] if place else host()
    return "an executor" if found is None else f"the executor on {found}"


def _no_python(where: str, path: str, why: str) -> str:
    told = f"{where} cannot start the Python that PYSPARK_PYTHON names, {path}: {why}. "
    if "/" not in path:
        return told + "It is not on the PATH there: set PYSPARK_PYTHON to an absolute path"
    if path.startswith("/"):
        return told + "Install it on every host, or set PYSPARK_PYTHON to a path that all have"
    folder, _, rest = path.removeprefix("./").partition("/")
    return told + (
        "The path is relative, so spark.archives must provide it: does that setting end in "
        f"#{folder}, and does the archive have {rest}? If so, it may link to a Python that the "
        "host lacks: venv-pack packs a link to the one the environment was created with, which "
        "every host then needs at the same path; conda-pack packs Python itself"
    )
