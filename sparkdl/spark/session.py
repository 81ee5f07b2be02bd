"""Sessions set up for training, and what their settings demand of connections and disks.

A demand is met, or refused with an error.

``spark.authenticate`` demands nothing of our own connections, which all require the job's token,
but the ports of gloo, NCCL and torch's TCPStore admit whoever reaches them.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pyspark import SparkConf
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError, SetupError
from sparkdl.spark.catalyst.jvm import (
    CAN_START_SPARK,
    Py4JJavaError,
    is_stopped,
    is_true,
    running_context,
)

PLAINTEXT = "spark.sparkdl.collective.plaintext"
"""Setting: whether gloo and NCCL may be used despite demands to encrypt or authenticate."""
AUTHENTICATE = "spark.authenticate"
"""The setting that makes Spark's own processes prove that they belong to the application."""
NETWORK_SETTINGS = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.ssl.enabled",
)
"""Any of these settings, if true, makes Spark encrypt connections."""
DISK_SETTING = "spark.io.encryption.enabled"


def encrypts_connections(spark: SparkSession, tls: bool) -> bool:
    """Whether a job's connections must be encrypted, by the user's wish or Spark's settings."""
    return tls or _first_enabled(spark) is not None


def require_trusted_network(spark: SparkSession, tls: bool, who: str) -> None:
    """Check that gloo and NCCL, which neither encrypt nor authenticate, may be used.

    Args:
        spark: the session.
        tls: whether the user wants encryption.
        who: what exchanges over them, for the message.

    Raises:
        ConfigError: encryption or authentication is demanded, and no setting exempts these.
    """
    if is_true(spark, PLAINTEXT):
        return
    if encrypts_connections(spark, tls):
        setting = _first_enabled(spark)
        demand = "tls is True" if setting is None else f"{setting} is true"
        lack, danger = "do not encrypt", "read"
    elif is_true(spark, AUTHENTICATE):
        demand = f"{AUTHENTICATE} is true"
        lack, danger = "accept anyone who reaches their ports", "reach"
    else:
        return
    raise ConfigError(
        f"{demand}, but {who} exchanges over gloo or NCCL, which {lack}. Fit a "
        "TorchEstimator with ParameterAveraging(), which exchanges through the driver; or, if "
        f"nobody else can {danger} the network between the executors, set {PLAINTEXT}=true"
    )


def keeps_rows_in_memory(spark: SparkSession, store_in: str = "disk") -> str | None:
    """What demands that rows are never on a disk, in words; None if nothing does.

    Args:
        spark: the session, whose setting says whether disks must be encrypted.
        store_in: the user's wish, ``disk`` or ``memory``.
    """
    if is_true(spark, DISK_SETTING):
        return f"{DISK_SETTING} is true"
    return "storeIn is 'memory'" if store_in == "memory" else None


def _first_enabled(spark: SparkSession) -> str | None:
    return next((name for name in NETWORK_SETTINGS if is_true(spark, name)), None)


logger = logging.getLogger(__name__)

# A training job may last seconds; on two cores a sixth of its first Spark job's time goes into
# optimizing code that ran a few thousand times. Ten times as many runs are soon enough.
_COMPILE_LATER = " ".join(
    (
        "-XX:Tier4InvocationThreshold=50000",
        "-XX:Tier4MinInvocationThreshold=6000",
        "-XX:Tier4CompileThreshold=150000",
        "-XX:Tier4BackEdgeThreshold=400000",
    )
)

DEFAULTS = {
    "spark.driver.defaultJavaOptions": _COMPILE_LATER,
    "spark.executor.defaultJavaOptions": _COMPILE_LATER,
    # A bar of our own shows progress; Spark's would write over it.
    "spark.ui.showConsoleProgress": "false",
    # Workers wait for each other: a task that waits 3 s for locality makes all wait.
    "spark.locality.wait": "0s",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # From files, Spark 4.2 and newer else copy columns into rows in code that no stage compiles:
    # `transform` then takes 1.2 to 1.5 times the processor time. Older Sparks ignore this.
    "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",
}

PYTHON = "spark.pyspark.python"

SENT_FILES = {
    "spark.archives": "--archives",
    "spark.files": "--files",
    "spark.jars": "--jars",
    "spark.submit.pyFiles": "--py-files",
}
"""Settings that list files that a session sends to its executors, with spark-submit's options."""


def create_session(
    app_name: str = "sparkdl",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    remote: str | None = None,
) -> SparkSession:
    """Create a Spark session whose executors run this Python, or one of Spark Connect.

    If there is a session already, as in a notebook of a platform, it is returned as it is, but for
    ``conf``.

    Args:
        app_name: shown in the Spark UI.
        master: for example ``local[2]`` or ``local-cluster[2,1,2048]``; by default what
            spark-submit or spark-defaults.conf says, else ``local[*]``.
        conf: further Spark settings; they win over the defaults made here, and
            ``spark.pyspark.python`` over the environment's PYSPARK_PYTHON.
        remote: the address of a Spark Connect server, ``sc://host:port``, whose settings and Python
            hold but for ``conf``; needs no Java here.

    Raises:
        ConfigError: both a master and a server are given.
        SetupError: there is no Java, or no Spark but a client of Spark Connect; or a file that a
            setting tells Spark to send is not there; or a package is missing that Spark Connect
            needs.
    """
    if remote is not None:
        return _connected(remote, master, conf or {})
    there = current_session()
    if there is not None and is_stopped(there):
        there = None
    if not CAN_START_SPARK and (there is None or master is not None):
        raise SetupError(
            "this Python has pyspark-client, which connects to a Spark that runs elsewhere and "
            "cannot start one: give the address of a Spark Connect server, "
            "remote='sc://host:15002', or install pyspark in place of pyspark-client"
        )
    if there is not None:
        _configure(there, conf or {})
        return there
    find_java()
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    settings = DEFAULTS | dict(conf or {})
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with _compiler_imported_meanwhile(), _python_of_executors(settings.get(PYTHON)):
            return builder.getOrCreate()
    except Py4JJavaError as error:
        message = str(error.java_exception)
        # spark-submit's own options are among the defaults of a SparkConf.
        if missing := _unreadable_file(message, dict(SparkConf().getAll()) | settings):
            raise SetupError(missing) from error
        raise


def _configure(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Change settings of a session that runs, and say which it would have to be started with."""
    for key, value in conf.items():
        if spark.conf.get(key, None) == value:
            continue
        try:
            spark.conf.set(key, value)
        except PySparkException:
            logger.warning(
                "%s has no effect: there is a Spark session already, which keeps the value that it "
                "was started with. Stop it first (spark.stop()), or set it where that is created",
                key,
            )


def _connected(remote: str, master: str | None, conf: Mapping[str, str]) -> SparkSession:
    if master is not None:
        raise ConfigError(
            f"master='{master}' starts Spark here, and remote='{remote}' names a server that has "
            "started it: give one of them"
        )
    builder = SparkSession.builder.remote(remote)
    for key, value in conf.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except ImportError as error:
        raise SetupError(f"{error} pip install 'sparkdl-torch[connect]' has all of them") from error


@contextmanager
def _python_of_executors(wanted: str | None) -> Iterator[None]:
    """Have executors run this Python, what PYSPARK_PYTHON names, or what a setting does.

    PySpark only looks into the environment when it makes a context, and else starts whatever
    ``python3`` is on their PATH.
    """
    before = os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_PYTHON"] = wanted or before
    try:
        yield
    finally:
        os.environ["PYSPARK_PYTHON"] = before


@contextmanager
def _compiler_imported_meanwhile() -> Iterator[None]:
    """Have torch import its compiler while Java starts, which Python otherwise just waits for.

    An optimizer's first step imports it, which takes about a second, and ``fit`` tries one here.
    """
    with ThreadPoolExecutor(1) as pool:
        if "torch" in sys.modules and running_context() is None:
            pool.submit(importlib.import_module, "torch._dynamo")
        yield


def _unreadable_file(message: str, settings: Mapping[str, str]) -> str | None:
    """Which file Spark failed to send, in words; None if it failed for another reason."""
    for key, option in SENT_FILES.items():
        for uri in filter(None, settings.get(key, "").split(",")):
            path = urlsplit(uri.strip()).path
            if path and path in message:
                return (
                    f"Spark cannot send {path} to the executors: {message}. {key} ({option} of "
                    "spark-submit) names it. Create the file, or correct the path: it is on "
                    f"this machine, relative to {Path.cwd()}, unless it begins with a scheme "
                    "such as hdfs:// or s3a://"
                )
    return None


def current_session() -> SparkSession | None:
    """The thread's own session, else the application's; None if there is none.

    A thread started by Python has none of its own.
    """
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def find_java() -> Path:
    """The Java that Spark will run on.

    Raises:
        SetupError: it will find none; the message says what to install.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        program = Path(home) / "bin" / "java"
        if program.exists():
            return program
        raise SetupError(
            f"JAVA_HOME is {home}, but there is no bin/java in it. Point it at a Java 17 or 21 "
            "installation, or unset it"
        )
    found = shutil.which("java")
    if found is None:
        raise SetupError(
            "Spark needs Java 17 or 21, and no `java` was found on PATH (JAVA_HOME is not set). "
            "Install it: `apt-get install openjdk-17-jre-headless` (Debian, Ubuntu), "
            "`dnf install java-17-openjdk-headless` (Fedora, RHEL), `brew install openjdk@17` "
            "(macOS), or `conda install openjdk=17`"
        )
    return Path(found)
