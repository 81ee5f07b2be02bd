"""What is no DataFrame, or of no session that runs, is told as what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.ml import Pipeline
from pyspark.sql import DataFrame
from torch.utils.data import DataLoader

import sparkdl
from sparkdl import NearDuplicates, TorchClassifier, TorchEstimator, TorchModel
from sparkdl.errors import ConfigError, DataError, SetupError
from sparkdl.jobs.sources import Rows, Source
from sparkdl.spark.session.required import require_frame, require_session


def test_what_is_no_frame_is_named_with_what_makes_one() -> None:
    values = {
        "pandas.DataFrame": pd.DataFrame({"x": [1]}),
        "numpy.ndarray": np.zeros(2),
        "pyarrow.Table": pa.table({"x": [1]}),
        "torch.DataLoader": DataLoader([]),
        "type": DataFrame,
        "str": "/data/x.parquet",
        "NoneType": None,
    }
    for what, value in values.items():
        told = rf"^df must be a Spark DataFrame, got a value of type {what}\. "
        with pytest.raises(ConfigError, match=told):
            require_frame(value)


def test_whatever_takes_a_frame_asks_first() -> None:
    model = TorchModel.from_module(torch.nn.Linear(1, 1), torch.zeros(1, 1))
    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.Adam
    )

    class Own(Source):
        def read(self, spark: Any) -> Any:
            return [1, 2]

    with pytest.raises(ConfigError, match=r"what Own\.read returns must be a Spark DataFrame, got"):
        Rows().read(Own(), None)  # type: ignore[arg-type]
    classifier = TorchClassifier(model=torch.nn.Linear(1, 2), optimizer=torch.optim.Adam)
    duplicates = NearDuplicates(hash="simhash", inputCol="text", keep="id")
    calls: list[Any] = [
        estimator.fit,
        classifier.fit,
        duplicates.fit,
        Pipeline(stages=[estimator]).fit,
        lambda rows: estimator.fit(rows, [{}]),
        lambda rows: sparkdl.plan(estimator, rows),
        lambda rows: next(iter(estimator.fitMultiple(rows, [{}])))[1],
        lambda rows: estimator.fit(rows, warm_start=model),
        model.transform,
        lambda rows: model.evaluate(rows, {}),
        lambda rows: sparkdl.run(print, df=rows),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"^df must be a Spark DataFrame, got .* list\."):
            call([1, 2])


def frame_of(context: Any, *, streams: bool = False, connect: bool = False) -> DataFrame:
    class Frame(DataFrame):
        sparkSession = SimpleNamespace(sparkContext=context)  # type: ignore[assignment]
        isStreaming = streams  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    if connect:
        Frame.__module__ = "pyspark.sql.connect.dataframe"
    frame: DataFrame = object.__new__(Frame)
    return frame


def running(*, stopped: bool = False) -> Any:
    scala = SimpleNamespace(isStopped=lambda: stopped)
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))


def test_a_frame_of_a_spark_connect_session_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"Spark Connect.*spark-submit"):
        require_frame(frame_of(None, connect=True))
    with pytest.raises(ConfigError, match=r"Spark Connect.*spark-submit"):
        require_session(frame_of(None, connect=True))  # type: ignore[arg-type]


def test_spark_connect_before_4_0_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.9")
    with pytest.raises(ConfigError, match=r"Spark Connect session.* Spark 3\.5\.9 .*from 4\.0 on"):
        require_frame(frame_of(None, connect=True))


def test_a_spark_connect_server_older_than_the_client_is_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Session:
        """In place of Spark Connect's, whose modules need grpc."""

        is_stopped = False

        def __init__(self, version: str) -> None:
            self.versions = [version]

        @property
        def version(self) -> str:
            return self.versions.pop()  # asks the server, which happens once

    Session.__module__ = "pyspark.sql.connect.session"
    monkeypatch.setattr("pyspark.__version__", "4.3.0")
    told = r"server runs Spark 4\.2\.1, and this client is PySpark 4\.3\.0.*client==4\.2\.\*' here"
    for check in (require_session, require_frame):
        for version in ("4.3.0", "4.3.2", "4.10.0", "5.0.0.dev1"):
            session: Any = Session(version)
            of_session = frame_of(None, connect=True)
            type(of_session).sparkSession = session
            for _ in range(2):
                check(session if check is require_session else of_session, connect=True)
        session = Session("4.2.1")
        type(of_session).sparkSession = session
        with pytest.raises(SetupError, match=told):
            check(session if check is require_session else of_session, connect=True)
    monkeypatch.setattr("pyspark.__version__", "16.4.0")  # of a vendor
    require_session(Session("4.2.1"), connect=True)  # type: ignore[arg-type]


def test_a_session_that_was_stopped_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "the Spark session has been stopped that df belongs to: "
    for context in (SimpleNamespace(_jsc=None), running(stopped=True)):
        monkeypatch.setattr(SparkContext, "_active_spark_context", None)
        with pytest.raises(ConfigError, match=f"{told}create another with sparkdl.create_session"):
            require_frame(frame_of(context))
        monkeypatch.setattr(SparkContext, "_active_spark_context", running())
        again = f"{told}read the rows again in the one that runs now"
        with pytest.raises(ConfigError, match=again):
            require_frame(frame_of(context))
        session: Any = SimpleNamespace(_jsparkSession=None, sparkContext=context)
        with pytest.raises(ConfigError, match="the Spark session has been stopped: create another"):
            require_session(session)


def test_a_jvm_that_has_ended_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise Py4JError("An error occurred while calling o31.sc")

    monkeypatch.setattr(SparkContext, "_jvm", None)
    monkeypatch.setattr("sparkdl.spark.catalyst.jvm._answers", lambda: False)
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=None))
    with pytest.raises(ConfigError, match="Spark's JVM no longer answers"):
        require_frame(frame_of(SimpleNamespace(_jsc=SimpleNamespace(sc=gone))))


def test_a_stream_is_refused_where_all_rows_are_needed() -> None:
    stream = frame_of(running(), streams=True)
    require_frame(stream)
    with pytest.raises(DataError, match=r"no last row.*Evaluate on the batches that foreachBatch"):
        require_frame(stream, to_end="Evaluate on")
