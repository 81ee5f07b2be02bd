"""What a session and a DataFrame must be first, and whether the driver's JVM is still there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import pyspark
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError, DataError, SetupError
from sparkdl.spark.catalyst.jvm import (
    Py4JError,
    end_of_jvm,
    has_jvm,
    is_of_connect,
    is_stopped,
    running_context,
)
from sparkdl.spark.catalyst.versions import of_spark_3
from sparkdl.spark.session import current_session

_ANOTHER = "create another with sparkdl.create_session()"
_SPARKS = range(10)
"""First numbers of versions that are Spark's own: some vendors count their clients otherwise."""
_asked: WeakSet[SparkSession] = WeakSet()
"""Sessions of Spark Connect whose server is known to be new enough."""


@contextmanager
def jvm_named() -> Iterator[None]:
    """Raise that Spark's JVM has ended, if that is why a call into it fails; also a decorator.

    Raises:
        ConfigError: it has ended.
    """
    try:
        yield
    except (Py4JError, OSError) as error:
        ended = end_of_jvm(error)
        if ended is None:  # an interrupt in the middle of a call, for example
            raise
        raise ConfigError(ended) from error


def require_frame(
    value: object, name: str = "df", *, to_end: str | None = None, connect: bool = False
) -> None:
    """Check that a value is a DataFrame of a session that runs.

    Args:
        value: what the user has given.
        name: of the argument.
        to_end: what is done with the rows, if that takes all of them: a verb, capitalized; None if
            a stream will do.
        connect: whether one of Spark Connect will do.

    Raises:
        ConfigError: it is no DataFrame, its session has been stopped, or is Spark Connect's where
            that will not do.
        DataError: it is a stream, but must not be.
        SetupError: its server is older than this client.
    """
    if is_of_connect(value) and not (connect and isinstance(value, DataFrame)):
        raise _of_connect("the DataFrame belongs to")  # before Spark 4 it is of another class
    if not isinstance(value, DataFrame):
        kind = type(value)
        package = kind.__module__.partition(".")[0]
        found = kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"
        raise ConfigError(
            f"{name} must be a Spark DataFrame, got a value of type {found}. "
            "spark.createDataFrame makes one of pandas, Arrow tables, arrays, lists and RDDs, "
            "to_spark() of pandas-on-Spark, spark.read of files; what reads rows itself goes into "
            "a function of sparkdl.run"
        )
    if _is_stopped(value.sparkSession):
        running = running_context()
        own = None if is_of_connect(value) else value.sparkSession.sparkContext
        other = running is not None and running is not own
        # Until then, Spark takes one whose server has gone for the active one, and no other.
        end = "call its stop(), " if is_of_connect(value) else ""
        first = "" if other else f"{end}{_ANOTHER}, and "
        raise ConfigError(
            f"the Spark session has been stopped that {name} belongs to: {first}read the rows "
            f"again in {'the one that runs now' if other else 'it'}"
        )
    _require_server(value.sparkSession)
    if to_end is not None and value.isStreaming:
        raise DataError(
            "the DataFrame is a stream, which has no last row, so this would never end. "
            f"{to_end} the batches that foreachBatch hands out, or a table that the stream is "
            "written to; transform takes streams"
        )


def require_session(spark: SparkSession | None = None, *, connect: bool = False) -> SparkSession:
    """The session, which runs.

    Args:
        spark: one that the user has given; the thread's or the application's if None.
        connect: whether one of Spark Connect will do.

    Raises:
        ConfigError: there is none, it has been stopped, or is Spark Connect's where that will not
            do.
        SetupError: its server is older than this client.
    """
    if spark is None:
        with jvm_named():
            spark = current_session()
    if spark is not None and is_of_connect(spark) and not connect:
        raise _of_connect("this is")
    if spark is None and not has_jvm():
        raise ConfigError(
            "there is no active Spark session; create one with sparkdl.create_session()"
        )
    if spark is None or _is_stopped(spark):
        raise ConfigError(f"the Spark session has been stopped: {_ANOTHER}")
    _require_server(spark)
    return spark


def _is_stopped(spark: SparkSession) -> bool:
    with jvm_named():
        return is_stopped(spark)


def _require_server(spark: SparkSession) -> None:
    """Refuse a server of Spark Connect that is older than this client, which Spark itself lets be.

    A newer one has all that a client asks for.

    Raises:
        SetupError: it is older.
    """
    if not is_of_connect(spark) or spark in _asked:
        return
    there, here = spark.version, pyspark.__version__
    if _series(here)[0] in _SPARKS and _series(there) < _series(here):
        # Not every release of Spark has a pyspark-client, but every series has.
        client = ".".join(map(str, _series(there)))
        raise SetupError(
            f"the Spark Connect server runs Spark {there}, and this client is PySpark {here}, "
            "which asks for what older servers do not have: pip install 'pyspark-client=="
            f"{client}.*' here, or connect to a newer server"
        )
    _asked.add(spark)


def _series(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, version.split(".")[:2]))


def _of_connect(what: str) -> ConfigError:
    instead = "Submit the job with spark-submit, or create one with sparkdl.create_session()"
    if of_spark_3():
        return ConfigError(
            f"{what} a Spark Connect session, which lacks in Spark {pyspark.__version__} what "
            f"sparkdl needs there from 4.0 on. {instead}"
        )
    return ConfigError(
        f"{what} a Spark Connect session, whose driver is another machine, and this needs to run "
        f"in the driver (fit, transform, evaluate, run and udf need not). {instead}"
    )
