"""A fit of a Spark Connect client, which has no JVM, against one of a session in the driver."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fits_anywhere
import numpy as np
import pytest
from connecting import asked_of_client, connect_address
from pyspark.sql import SparkSession

from sparkdl.errors import TrainingError, WorkerError, WorkerLostError
from sparkdl.estimator.in_stage import _described, _Plain, _restored

__all__ = ["connect_address"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_a_client_cannot_have_is_refused_in_words(
    connect_address: str, tmp_path: Path
) -> None:
    found, _ = asked_of_client(connect_address, fits_anywhere.refusals, tmp_path)
    for name, words in {
        "callback": "ConfigError: TrainingReport runs in the driver between rounds",
        "workers": "ConfigError: numWorkers is 7, but the cluster has 3 slots",
        "partitions": "ConfigError: shuffleRows='none' leaves rows in their partitions, but those",
        "column": "DataError: ",
        "run": "ConfigError: the DataFrame belongs to a Spark Connect session",
        "run without rows": "ConfigError: this is a Spark Connect session",
        "distributor": "ConfigError: this is a Spark Connect session",
        "udf": "ConfigError: this is a Spark Connect session",
        "volume": "ConfigError: this is a Spark Connect session",
        "duplicates": "ConfigError: the DataFrame belongs to a Spark Connect session",
        "plan": "ConfigError: the DataFrame belongs to a Spark Connect session",
        "rows": "DataError: ",
        "few": "DataError: dropLast leaves nothing: the workers have at most ",
        "nothing": "DataError: ",
    }.items():
        assert found[name].startswith(words), found[name]


@pytest.mark.slow
def test_all_workers_start_again_when_one_is_lost(connect_address: str, tmp_path: Path) -> None:
    (first, second, whole), printed = asked_of_client(
        connect_address, fits_anywhere.survived, tmp_path
    )
    assert first == whole
    assert second == whole
    assert "start again from the beginning, as there is no checkpointPath" in printed
    assert "start again from the last checkpoint in " in printed


def test_errors_come_back_as_what_they_were() -> None:
    lost = WorkerLostError("gone", ranks=(1, 2))
    lost.add_note("said before")
    failed = WorkerError("bad", rank=1, epoch=2, step=3, worker_traceback="line")
    for error in (lost, failed, TrainingError("ended")):
        back = _restored(pickle.loads(pickle.dumps(_described(error))))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_what_comes_back_runs_no_code() -> None:
    import io
    import os

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    with pytest.raises(TrainingError, match=r"names posix\.system"):
        _Plain(io.BytesIO(pickle.dumps(Evil()))).load()
