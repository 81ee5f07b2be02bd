"""What is asked of a session and its frames, and whether its connections are encrypted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from frames import estimator, frame, same_bits
from models import append_line, lines, task_rank
from open_files import unnamed_files
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.ml import Pipeline
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sparkdl
from sparkdl import (
    GradientAllReduce,
    NearDuplicates,
    ParameterAveraging,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
)
from sparkdl.errors import ConfigError, DataError, SetupError
from sparkdl.jobs.sources import Rows, Source
from sparkdl.spark import session as sessions
from sparkdl.spark.required import require_frame, require_session
from sparkdl.spark.rows import scratch


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

    refused = pytest.raises(ConfigError, match=r"what Own\.read returns must be a Spark DataFrame")
    with refused, Rows().read(Own(), None):  # type: ignore[arg-type]
        pass
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


def test_a_session_whose_connect_server_has_gone_is_to_be_stopped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    of_session = frame_of(None, connect=True)
    gone = type("Session", (), {"is_stopped": True, "__module__": "pyspark.sql.connect.session"})
    type(of_session).sparkSession = gone()
    with pytest.raises(ConfigError, match=r"call its stop\(\), create another with sparkdl\."):
        require_frame(of_session, connect=True)


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


cloudpickle.register_pickle_by_value(sys.modules[__name__])

Setting = Callable[[str, str], None]


@pytest.fixture
def setting(spark: SparkSession) -> Iterator[Setting]:
    """Sets what the session says of its configuration, until the test ends."""
    conf = spark.sparkContext._conf
    before = dict(conf.getAll())
    yield conf.set
    conf.setAll(before.items())
    ours = (sessions.AUTHENTICATE, sessions.DISK_SETTING, sessions.PLAINTEXT)
    for name in (*sessions.NETWORK_SETTINGS, *ours):
        conf.set(name, before.get(name, "false"))


def session(**conf: str) -> Any:
    settings = {name.replace("_", "."): value for name, value in conf.items()}
    return SimpleNamespace(conf={}, sparkContext=SimpleNamespace(_conf=settings))


def test_any_setting_that_encrypts_sparks_connections_encrypts_ours() -> None:
    for name, value in product(sessions.NETWORK_SETTINGS, ("true", "TRUE", " true ")):
        demanded = session(**{name: value})
        assert sessions.encrypts_connections(demanded, False), (name, value)
        with pytest.raises(ConfigError, match=f"{name} is true, but Gossip exchanges over gloo"):
            sessions.require_trusted_network(demanded, False, "Gossip")


def test_connections_are_not_encrypted_unless_asked_for() -> None:
    for conf in ({}, {"spark.ssl.enabled": "false", "spark.authenticate": "false"}):
        assert not sessions.encrypts_connections(session(**conf), False)
        sessions.require_trusted_network(session(**conf), False, "Gossip")
    assert sessions.encrypts_connections(session(), True)


def test_ports_without_a_token_are_refused_where_spark_authenticates() -> None:
    refused = rf"authenticate is true, but Gossip .* accept anyone.* set {sessions.PLAINTEXT}=true"
    for value in ("true", "TRUE", " true "):
        demanded = session(spark_authenticate=value)
        assert not sessions.encrypts_connections(demanded, False)
        with pytest.raises(ConfigError, match=refused):
            sessions.require_trusted_network(demanded, False, "Gossip")


def test_a_user_may_declare_the_network_among_executors_safe() -> None:
    conf = {
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        sessions.PLAINTEXT: "true",
    }
    sessions.require_trusted_network(session(**conf), True, "Gossip")
    assert sessions.encrypts_connections(session(**conf), False)


def test_a_host_without_a_file_system_in_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    with pytest.raises(ConfigError, match=f"this is so, so rows .* in memory, but {tmp_path}"):
        scratch.row_directory("this is so")


class Watches(nn.Module):
    """Writes down which files without a name its process has open."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.path = path

    def forward(self, features: Tensor) -> Tensor:
        if task_rank() >= 0:
            for file in unnamed_files():
                append_line(self.path, file)
        return self.layer(features)


@pytest.mark.nightly
def test_an_encrypted_fit_gives_the_same_bits(spark: SparkSession) -> None:
    rows = frame(spark)
    plain, encrypted = estimator(epochs=2), estimator(epochs=2).setTls(True)
    assert (plain.getTls(), encrypted.getTls()) == (False, True)
    assert same_bits(encrypted.fit(rows), plain.fit(rows))


@pytest.mark.parametrize(
    "strategy", [GradientAllReduce(), ParameterAveraging(aggregation="executors")], ids=repr
)
def test_tls_is_refused_where_gradients_would_travel_in_the_clear(
    spark: SparkSession, strategy: Any
) -> None:
    with pytest.raises(ConfigError, match=r"tls is True, but .* exchanges over gloo or NCCL"):
        estimator(strategy=strategy, tls=True).fit(frame(spark))


def test_an_all_reduce_is_refused_where_spark_authenticates_and_a_round_of_the_driver_is_not(
    spark: SparkSession, setting: Setting
) -> None:
    setting("spark.authenticate", "true")
    with pytest.raises(ConfigError, match="authenticate is true, but GradientAllReduce exchanges"):
        estimator(strategy=GradientAllReduce()).fit(frame(spark))
    estimator().fit(frame(spark))


@pytest.mark.gate
def test_functions_of_ones_own_are_refused_where_spark_has_to_encrypt_or_authenticate(
    spark: SparkSession, setting: Setting
) -> None:
    for name in ("spark.authenticate", "spark.network.crypto.enabled"):
        setting(name, "true")
        with pytest.raises(ConfigError, match=f"{name} is true, but what sparkdl.run calls"):
            sparkdl.run(task_rank, num_workers=2)
    setting(sessions.PLAINTEXT, "true")
    assert sparkdl.run(task_rank, num_workers=2) == [0, 1]


@pytest.mark.gate
def test_rows_stay_in_memory_where_the_user_or_spark_wants_no_plain_disks(
    spark: SparkSession, setting: Setting, tmp_path: Path
) -> None:
    def rows_are_in(**changes: Any) -> set[str]:
        trace = tmp_path / f"files-{len(list(tmp_path.iterdir()))}"
        estimator(model=Watches(str(trace)), **changes).fit(frame(spark))
        files = map(Path, lines(trace))
        return {"memory" if scratch.MEMORY in file.parents else "disk" for file in files}

    assert rows_are_in(storeIn="memory") == {"memory"}
    setting(sessions.DISK_SETTING, "true")
    assert rows_are_in() == {"memory"}
