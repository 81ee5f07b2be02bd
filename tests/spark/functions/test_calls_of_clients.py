"""``sparkdl.run``, ``TorchDistributor`` and UDFs of a Spark Connect client, which has no JVM."""

from __future__ import annotations

from pathlib import Path

import calls_anywhere
import pytest
from connecting import asked_of_client, connect_address
from pyspark.sql import SparkSession

__all__ = ["connect_address"]


@pytest.mark.gate
def test_calls_return_in_a_client_what_they_return_in_the_driver(
    spark: SparkSession, connect_address: str, tmp_path: Path
) -> None:
    found, printed = asked_of_client(connect_address, calls_anywhere.answers, tmp_path)
    expected = calls_anywhere.answers(spark)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert found[name] == wanted, name
    lines = printed.splitlines()
    assert {f"[rank {rank}] a word from rank {rank}" for rank in range(3)} <= set(lines)
    assert lines.count("[rank 1] a script's sum 5.0") == 1


@pytest.mark.nightly
def test_a_client_can_import_all_there_is(connect_address: str, tmp_path: Path) -> None:
    found, _ = asked_of_client(connect_address, calls_anywhere.modules, tmp_path)
    assert {"sparkdl.spark.session", "TorchEstimator"} <= set(found)


@pytest.mark.nightly
def test_calls_that_fail_say_why_in_a_client(connect_address: str, tmp_path: Path) -> None:
    found, _ = asked_of_client(connect_address, calls_anywhere.refusals, tmp_path)
    for name, words in {
        "raises": ["WorkerError: rank 1 on ", "LookupError: no such thing"],
        "dies": ["WorkerLostError: ", "was ended by SIGKILL"],
        "first dies": ["WorkerLostError: ", "exited with code 3"],
        "workers": ["ConfigError: num_workers is 7, but the cluster has 3 slots"],
        "empty": ["DataError: ", "is empty"],
        "partitions": ["ConfigError: shuffleRows='none'", "does not say how many partitions"],
        "checkpoint": ["WorkerError: rank 0 ", "over Spark Connect there is no Hadoop"],
        "start": ["SetupError: this Python has pyspark-client, which connects to a Spark that"],
    }.items():
        for each in words:
            assert each in found[name], found[name]
        assert found[name].startswith(words[0]), found[name]
