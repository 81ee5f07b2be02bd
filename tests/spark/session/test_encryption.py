"""What Spark's settings demand of connections and disks is kept, or refused in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame, same_bits
from models import append_line, lines, task_rank
from open_files import unnamed_files
from pyspark.sql import SparkSession
from torch import Tensor, nn

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.errors import ConfigError
from sparkdl.spark.rows import scratch
from sparkdl.spark.session import encryption

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Setting = Callable[[str, str], None]


@pytest.fixture
def setting(spark: SparkSession) -> Iterator[Setting]:
    """Sets what the session says of its configuration, until the test ends."""
    conf = spark.sparkContext._conf
    before = dict(conf.getAll())
    yield conf.set
    conf.setAll(before.items())
    ours = (encryption.AUTHENTICATE, encryption.DISK_SETTING, encryption.PLAINTEXT)
    for name in (*encryption.NETWORK_SETTINGS, *ours):
        conf.set(name, before.get(name, "false"))


def session(**conf: str) -> Any:
    settings = {name.replace("_", "."): value for name, value in conf.items()}
    return SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: settings))


def test_any_setting_that_encrypts_sparks_connections_encrypts_ours() -> None:
    for name, value in product(encryption.NETWORK_SETTINGS, ("true", "TRUE", " true ")):
        demanded = session(**{name: value})
        assert encryption.encrypts_connections(demanded, False), (name, value)
        with pytest.raises(ConfigError, match=f"{name} is true, but Gossip exchanges over gloo"):
            encryption.require_trusted_network(demanded, False, "Gossip")


def test_connections_are_not_encrypted_unless_asked_for() -> None:
    for conf in ({}, {"spark.ssl.enabled": "false", "spark.authenticate": "false"}):
        assert not encryption.encrypts_connections(session(**conf), False)
        encryption.require_trusted_network(session(**conf), False, "Gossip")
    assert encryption.encrypts_connections(session(), True)


def test_ports_without_a_token_are_refused_where_spark_authenticates() -> None:
    refused = (
        rf"authenticate is true, but Gossip .* accept anyone.* set {encryption.PLAINTEXT}=true"
    )
    for value in ("true", "TRUE", " true "):
        demanded = session(spark_authenticate=value)
        assert not encryption.encrypts_connections(demanded, False)
        with pytest.raises(ConfigError, match=refused):
            encryption.require_trusted_network(demanded, False, "Gossip")


def test_a_user_may_declare_the_network_among_executors_safe() -> None:
    conf = {
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        encryption.PLAINTEXT: "true",
    }
    encryption.require_trusted_network(session(**conf), True, "Gossip")
    assert encryption.encrypts_connections(session(**conf), False)


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
    setting(encryption.PLAINTEXT, "true")
    assert sparkdl.run(task_rank, num_workers=2) == [0, 1]


def test_rows_stay_in_memory_where_the_user_or_spark_wants_no_plain_disks(
    spark: SparkSession, setting: Setting, tmp_path: Path
) -> None:
    def rows_are_in(**changes: Any) -> set[str]:
        trace = tmp_path / f"files-{len(list(tmp_path.iterdir()))}"
        estimator(model=Watches(str(trace)), **changes).fit(frame(spark))
        files = map(Path, lines(trace))
        return {"memory" if scratch.MEMORY in file.parents else "disk" for file in files}

    assert rows_are_in(storeIn="memory") == {"memory"}
    setting(encryption.DISK_SETTING, "true")
    assert rows_are_in() == {"memory"}
