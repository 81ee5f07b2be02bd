"""A Spark Connect server in the tests' session, and clients in a Python without a JVM.

The clients' Python is the tests' own, with py4j hidden, or the one that ``CLIENT_PYTHON`` names:
``.ci/versions.py client`` has it name one with ``pyspark-client`` alone.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from subprocesses import printed_by

from sparkdl.spark.sending import ISOLATION

TOKEN = "of the tests"
CLIENT_PYTHON = os.environ.get("CLIENT_PYTHON", sys.executable)

_PROGRAM = """
import importlib.abc, importlib.util, logging, os, pickle, sys

class Hidden(importlib.abc.MetaPathFinder):
    # What the package pyspark-client lacks; the JVM is found by py4j alone.
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "py4j" or name.split(".")[:2] == ["pyspark", "core"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if importlib.util.find_spec("py4j"):
    sys.meta_path.insert(0, Hidden())
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
address, file, function, found = sys.argv[1:]
folder, module = os.path.split(file)
sys.path.insert(0, folder)
import sparkdl, torch
torch.set_num_threads(1)
spark = sparkdl.create_session(remote=address)
result = getattr(__import__(module.removesuffix(".py")), function)(spark)
assert "py4j" not in sys.modules
with open(found, "wb") as file:
    pickle.dump(result, file)
"""


@pytest.fixture(scope="session")
def connect_address(spark: SparkSession) -> Iterator[str]:
    """The address of a server of the tests' session, with the token that it wants."""
    assert spark.sparkContext._jvm is not None
    package: Any = spark.sparkContext._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    context: Any = spark.sparkContext._jsc.sc()  # type: ignore[union-attr]
    context.conf().set("spark.connect.grpc.binding.port", "0")
    context.conf().set("spark.connect.authenticate.token", TOKEN)
    context.conf().set(ISOLATION, "true")  # as Spark's own program that starts one does
    service.start(context)
    yield f"sc://localhost:{service.localPort()}/;token={TOKEN}"
    none = spark.sparkContext._jvm.scala.Option.apply(None)
    service.stop(none, none)


def asked_of_client(
    address: str, function: Callable[[SparkSession], object], tmp_path: Path
) -> tuple[Any, str]:
    """What a function of a session returns in a client without py4j, and what is printed there.

    Args:
        address: the server's.
        function: one of a module.
        tmp_path: where the answer is put.
    """
    printed = printed_by(*client(address, function, tmp_path), python=CLIENT_PYTHON)
    return pickle.loads((tmp_path / "found").read_bytes()), printed


def client(
    address: str, function: Callable[[SparkSession], object], tmp_path: Path
) -> list[str | Path]:
    """The arguments with which a Python is a client that calls a function; see above."""
    program = tmp_path / "client.py"
    tests = str(Path(__file__).parent)
    program.write_text(f"import sys; sys.path.insert(0, {tests!r})\n{_PROGRAM}")
    return [program, address, function.__code__.co_filename, function.__name__, tmp_path / "found"]
