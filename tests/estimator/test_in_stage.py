"""A fit of a Spark Connect client, which has no JVM, against one of a session in the driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fits_anywhere
import numpy as np
import pytest
from connecting import CLIENT_PYTHON, asked_of_client, client, connect_address
from pyspark.sql import SparkSession
from waiting import eventually

__all__ = ["connect_address"]


@pytest.mark.gate
def test_a_client_gets_what_the_driver_gets_to_the_bit(
    spark: SparkSession, connect_address: str, tmp_path: Path
) -> None:
    found, printed = asked_of_client(connect_address, fits_anywhere.told, tmp_path)
    expected = fits_anywhere.told(spark)
    for fit, wanted in expected.items():
        got = found[fit]
        assert got.keys() == wanted.keys()
        assert got["values"].keys() == wanted["values"].keys()
        for name, values in wanted.pop("values").items():
            assert np.array_equal(got["values"][name], values), (fit, name)
        for name in wanted:
            assert got[name] == wanted[name], (fit, name)
    assert {f"[rank {rank}] a word from a worker" for rank in range(3)} <= set(printed.splitlines())
    assert "because Spark Connect does not say how many partitions there are" in printed


@pytest.mark.gate
def test_a_clients_predictions_bring_the_labels_that_index_to_string_looks_for(
    connect_address: str, tmp_path: Path
) -> None:
    (columns, names), _ = asked_of_client(connect_address, fits_anywhere.classes, tmp_path)
    assert columns[-3:] == ["rawPrediction", "probability", "prediction"]
    assert names == ["down", "up"]


@pytest.mark.nightly
def test_what_a_client_cannot_have_is_refused_in_words(
    connect_address: str, tmp_path: Path
) -> None:
    found, _ = asked_of_client(connect_address, fits_anywhere.refusals, tmp_path)
    for name, words in {
        "callback": "ConfigError: TrainingReport runs in the driver between rounds",
        "workers": "ConfigError: numWorkers is 7, but the cluster has 3 slots",
        "partitions": "ConfigError: shuffleRows='none' leaves rows in their partitions, but those",
        "column": "DataError: ",
        "volume": "ConfigError: this is a Spark Connect session",
        "duplicates": "ConfigError: the DataFrame belongs to a Spark Connect session",
        "plan": "ConfigError: the DataFrame belongs to a Spark Connect session",
        "rows": "DataError: ",
        "few": "DataError: dropLast leaves nothing: the workers have at most ",
        "nothing": "DataError: ",
    }.items():
        assert found[name].startswith(words), found[name]


@pytest.mark.nightly
def test_all_start_again_from_the_beginning_when_a_worker_or_the_averager_is_lost(
    connect_address: str, tmp_path: Path
) -> None:
    function = fits_anywhere.survived_without_a_checkpoint
    found, printed = asked_of_client(connect_address, function, tmp_path)
    values, steps = found["nothing"]
    assert found == dict.fromkeys(found, (values, 2 * steps)) | {"nothing": (values, steps)}
    assert printed.count("start again from the beginning, as there is no checkpointPath") == 2


@pytest.mark.nightly
def test_all_start_again_from_a_checkpoint_when_a_worker_or_the_averager_is_lost(
    connect_address: str, tmp_path: Path
) -> None:
    function = fits_anywhere.survived_with_a_checkpoint
    found, printed = asked_of_client(connect_address, function, tmp_path)
    assert found == dict.fromkeys(found, found["nothing"])
    assert printed.count("start again from the last checkpoint in ") == 2


@pytest.mark.gate
def test_resume_never_continues_no_older_fit_after_a_loss(
    connect_address: str, tmp_path: Path
) -> None:
    found, _ = asked_of_client(connect_address, fits_anywhere.never_resumed, tmp_path)
    assert found["killed"]
    assert found["lost"] == found["nothing"]


@pytest.mark.gate
def test_a_model_that_is_never_built_on_the_first_executor_ends_the_fit(
    spark: SparkSession, connect_address: str, tmp_path: Path
) -> None:
    found, _ = asked_of_client(connect_address, fits_anywhere.never_built, tmp_path)
    assert found.startswith("ModelError: ")
    assert re.search(r"first task, on .* within 20 s: .*'timeout'", found), found
    assert "in built_in" in found
    tracker = spark.sparkContext.statusTracker()
    assert eventually(lambda: not tracker.getActiveStageIds(), wait_s=60)


@pytest.mark.nightly
def test_two_clients_fit_at_once(spark: SparkSession, connect_address: str, tmp_path: Path) -> None:
    homes = [tmp_path / "first", tmp_path / "second"]
    for home in homes:
        home.mkdir()
    ask = partial(asked_of_client, connect_address, fits_anywhere.parameters)
    with ThreadPoolExecutor(2) as pool:
        found = [parameters for parameters, _ in pool.map(ask, homes)]
    assert found == [fits_anywhere.parameters(spark)] * 2


@pytest.mark.gate
def test_an_interrupt_of_the_client_ends_the_stage(
    spark: SparkSession, connect_address: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    command = [CLIENT_PYTHON, *client(connect_address, fits_anywhere.endless, tmp_path)]
    program = subprocess.Popen(
        command, env={**os.environ, "BEGUN": str(begun)}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert eventually(lambda: begun.exists() or program.poll() is not None, wait_s=300)
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=300)
    finally:
        program.kill()
    assert "KeyboardInterrupt" in errors
    tracker = spark.sparkContext.statusTracker()
    assert eventually(lambda: not tracker.getActiveStageIds(), wait_s=300)
    assert fits_anywhere.parameters(spark)  # the slots are free again
