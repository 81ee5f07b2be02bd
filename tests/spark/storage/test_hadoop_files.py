"""Checkpoints on a file system that only Hadoop knows; here a view of a local directory."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from frames import estimator, frame, same_bits
from pyarrow import fs
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import ConfigError
from sparkdl.spark.storage.files import open_hadoop

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def view(spark: SparkSession, tmp_path: Path) -> str:
    """A URI below which Hadoop sees ``tmp_path / "real"``."""
    real = tmp_path / "real"
    real.mkdir()
    name = tmp_path.name.replace("_", "-")
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set(f"fs.viewfs.mounttable.{name}.link./data", real.as_uri())
    return f"viewfs://{name}/data"


def save(store: CheckpointStore, content: bytes) -> None:
    pending = store.begin()
    with pending.create("center") as file:
        file.write(content)
    pending.publish({"length": len(content)})


def test_checkpoints_are_published_found_verified_and_deleted(view: str, tmp_path: Path) -> None:
    store = CheckpointStore(f"{view}/job", keep_last=2, open_elsewhere=open_hadoop)
    contents = [bytes([number]) * 9_000_000 for number in range(4)]
    for content in contents:
        save(store, content)
    store.prune()
    there = sorted(path.name for path in (tmp_path / "real" / "job").iterdir())
    assert there == ["checkpoint-000003", "checkpoint-000004"]
    saved = CheckpointStore(f"{view}/job", keep_last=2, open_elsewhere=open_hadoop).newest()
    assert saved is not None
    with saved.open("center") as file:
        assert file.read() == contents[-1]


def test_a_damaged_one_is_skipped(
    view: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(f"{view}/job", keep_last=2, open_elsewhere=open_hadoop)
    save(store, b"first")
    save(store, b"second")
    damaged = tmp_path / "real" / "job" / "checkpoint-000002"
    (damaged / ".center.crc").unlink(missing_ok=True)
    (damaged / "center").write_bytes(b"secone")
    with caplog.at_level(logging.WARNING):
        saved = store.newest()
    assert saved is not None
    assert saved.description == {"length": 5}
    assert "checkpoint-000002 is damaged" in caplog.text


def test_what_is_not_there_is_said_to_be_missing(view: str) -> None:
    files, root = open_hadoop(view)
    assert files.get_file_info(f"{root}/nothing").type == fs.FileType.NotFound
    with pytest.raises(OSError, match="FileNotFound"):
        files.open_input_stream(f"{root}/nothing")
    with pytest.raises(OSError, match="refuses to change"):
        files.delete_file(f"{root}/nothing")


@pytest.mark.slow
def test_a_fit_goes_on_from_there(spark: SparkSession, view: str) -> None:
    rows = frame(spark)
    settings = {"checkpointPath": f"{view}/fit", "seed": 5}
    estimator(**settings, epochs=1).fit(rows)
    resumed = estimator(**settings, epochs=2).fit(rows)
    assert same_bits(resumed, estimator(seed=5, epochs=2).fit(rows))


def test_a_scheme_that_nobody_knows_is_refused_in_words(spark: SparkSession) -> None:
    for path in ("nosuch://host/path", "dbfs:/mnt/path"):
        with pytest.raises(ConfigError, match=r"cannot be used: .*No FileSystem for scheme"):
            estimator(checkpointPath=path).fit(frame(spark))


@pytest.mark.slow
def test_a_function_saves_and_loads_there_on_workers_that_have_no_java(
    view: str, tmp_path: Path
) -> None:
    path = f"{view}/run"

    def go_on() -> int:
        state = sparkdl.load_checkpoint(path) or {"epoch": 0, "values": torch.zeros(1_100_000)}
        new = {"epoch": state["epoch"] + 1, "values": state["values"] + 1}
        sparkdl.current_worker().save_checkpoint(path, new)
        return state["epoch"]

    assert sparkdl.run(go_on, num_workers=2) == [0, 0]
    assert sparkdl.run(go_on, num_workers=2) == [1, 1]
    state = sparkdl.load_checkpoint(path)
    assert state is not None
    assert (state["epoch"], state["values"].unique().tolist()) == (2, [2.0])
    assert len(list((tmp_path / "real" / "run").glob("checkpoint-*"))) == 2
