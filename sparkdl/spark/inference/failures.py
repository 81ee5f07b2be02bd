"""Errors of the user's code in tasks that predict: named there, and told again in the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from sparkdl.errors import DataError, ModelError, SetupError, SparkDLError
from sparkdl.spark.launch.environments import setup_error
from sparkdl.user_code.needed_modules import advice
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, message_of, shortened, traceback_of

_OURS = re.compile(rf"^{re.escape(SparkDLError.__module__)}\.(\w+): ", re.MULTILINE)
_OF_JAVA = re.compile(r"\n\s*(?:at (?:org|java|scala)\.|Driver stacktrace:)")
_KINDS = {each.__name__: each for each in (DataError, ModelError, SetupError)}


def as_model_error(what: str, error: BaseException) -> ModelError:
    """The error to raise in a task, ``from None``: Spark passes on texts of any length and class.

    Args:
        what: what has failed, and on what.
        error: what the user's code raised.
    """
    told = f"{what}: {message_of(error)}"
    if isinstance(error, ModuleNotFoundError):
        told += f"\n{advice(error)}"
    return ModelError(f"{told}\n\n{traceback_of(error)}")


@contextmanager
def told_in_driver() -> Iterator[None]:
    """Raise what a task has raised on purpose in place of Spark's report of it.

    Raises:
        DataError: rows do not fit.
        ModelError: the user's code failed.
        SetupError: an executor lacks a package, or has another version.
    """
    try:
        yield
    except PySparkException as error:
        text = str(error)
        if differing := setup_error(text):
            raise differing from error
        found = _OURS.search(text)
        if found is None or found[1] not in _KINDS:
            raise
        told = text[found.end() :]
        if of_java := _OF_JAVA.search(told):
            told = told[: of_java.start()]
        raise _KINDS[found[1]](shortened(told.strip(), TRACEBACK_CHARACTERS)) from error
