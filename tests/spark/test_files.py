"""Files in Spark's storage."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from frames import estimator, frame, same_bits
from pyarrow import fs
from pyspark import SparkContext
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchEstimator
from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import CheckpointError, ConfigError, SparkDLError, WorkerError
from sparkdl.spark import files
from sparkdl.spark.files import fetch, open_hadoop, publish


@pytest.fixture
def remote(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "remote").mkdir()
    name = f"view{uuid.uuid4().hex}"  # Hadoop keeps file systems by name
    link = f"fs.viewfs.mounttable.{name}.link./remote"
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set(link, (tmp_path / "remote").as_uri())
    yield f"viewfs://{name}/remote"
    hadoop.unset(link)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    directory = tmp_path / "made"
    (directory / "metadata").mkdir(parents=True)
    (directory / "metadata" / "part-00000").write_text("{}")
    (directory / "weights").write_bytes(bytes(range(256)))
    return directory


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def test_a_published_directory_is_fetched_with_the_same_bytes(remote: str, made: Path) -> None:
    """The copy is gone after the block."""
    publish(made, f"{remote}/model", overwrite=False)
    with fetch(f"{remote}/model") as fetched:
        assert files_in(fetched) == files_in(made)
    assert not fetched.exists()


def test_what_is_there_is_replaced_only_if_asked_and_nothing_is_left_beside_it(
    remote: str, made: Path, tmp_path: Path
) -> None:
    publish(made, f"{remote}/model", overwrite=False)
    with pytest.raises(ConfigError, match=r"already exists.*overwrite\(\)"):
        publish(made, f"{remote}/model", overwrite=False)
    (made / "weights").unlink()
    publish(made, f"{remote}/model", overwrite=True)
    with fetch(f"{remote}/model") as fetched:
        assert set(files_in(fetched)) == {"metadata/part-00000"}
    assert [p.name for p in (tmp_path / "remote").iterdir()] == ["model"]


def test_what_a_save_was_about_to_replace_is_found_when_it_was_interrupted(
    remote: str, made: Path, tmp_path: Path
) -> None:
    publish(made, f"{remote}/model", overwrite=False)
    (tmp_path / "remote" / "model").rename(tmp_path / "remote" / "model.sparkdl-replaced")
    with fetch(f"{remote}/model") as fetched:
        assert files_in(fetched) == files_in(made)
    with pytest.raises(ConfigError, match="already exists"):
        publish(made, f"{remote}/model", overwrite=False)
    publish(made, f"{remote}/model", overwrite=True)
    assert [p.name for p in (tmp_path / "remote").iterdir()] == ["model"]


def test_a_save_that_fails_leaves_what_was_there_and_no_fragment(
    remote: str, made: Path, tmp_path: Path
) -> None:
    publish(made, f"{remote}/model", overwrite=False)
    before = files_in(tmp_path / "remote" / "model")
    os.mknod(made / "socket", stat.S_IFSOCK)  # which cannot be copied
    with pytest.raises(CheckpointError, match=r"model could not be written: .*is unchanged"):
        publish(made, f"{remote}/model", overwrite=True)
    assert files_in(tmp_path / "remote") == {f"model/{n}": b for n, b in before.items()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_saves_at_once_one_is_refused_and_the_other_whole(
    remote: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """Hadoop would rename a directory into one that is there already."""
    (other := tmp_path / "other").mkdir()
    (other / "weights").write_bytes(b"of the other")
    (other / "made").mkdir()
    if overwrite:
        publish(made, f"{remote}/model", overwrite=False)
    rename = files._rename

    def after_the_other(fs: Any, path: Any, source: str, target: str) -> None:
        if target.endswith("/model"):
            shutil.copytree(other, tmp_path / "remote" / "model")
        rename(fs, path, source, target)

    monkeypatch.setattr(files, "_rename", after_the_other)
    with pytest.raises(CheckpointError, match=r"somebody else has written .*/model meanwhile"):
        publish(made, f"{remote}/model", overwrite=overwrite)
    assert files_in(tmp_path / "remote" / "model") == {"weights": b"of the other"}
    left = {path.name for path in (tmp_path / "remote").iterdir()}
    assert left <= {"model", "model.sparkdl-replaced"}
    monkeypatch.undo()
    publish(made, f"{remote}/model", overwrite=True)
    assert [path.name for path in (tmp_path / "remote").iterdir()] == ["model"]


def test_a_directory_may_hold_one_of_its_own_name(remote: str, made: Path) -> None:
    (made / "model").mkdir()
    (made / "model" / "more").write_text("x")
    for overwrite in (False, True):
        publish(made, f"{remote}/model", overwrite=overwrite)
    with fetch(f"{remote}/model") as fetched:
        assert files_in(fetched) == files_in(made)


def test_temporary_directories_may_have_any_name(
    remote: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = made.rename(tmp_path / "a %41 b#c?d:e")
    monkeypatch.setattr(tempfile, "tempdir", str(strange.parent / "x %41 y"))
    Path(tempfile.gettempdir()).mkdir()
    publish(strange, f"{remote}/model", overwrite=False)
    with fetch(f"{remote}/model") as fetched:
        assert files_in(fetched) == files_in(strange)


def test_errors_about_places_show_no_credentials(
    spark: SparkSession, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for place in ("nosuch://user:SECRET@host/model?sig=SECRET", "s3a://KEY:SECRET@bucket/model"):
        for session in (spark.sparkContext, None):
            monkeypatch.setattr(SparkContext, "_active_spark_context", session)
            with pytest.raises(SparkDLError) as caught:
                publish(made, place, overwrite=False)
            told.append(str(caught.value))
            with pytest.raises(SparkDLError) as caught, fetch(place):
                pass
            told.append(str(caught.value))
    assert not [each for each in told if "SECRET" in each or "://***@" not in each]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 50 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there_and_no_fragment(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    target = tmp_path / "local" / "model"
    publish(made, str(target), overwrite=False)
    before = files_in(target)
    (made / "weights").write_bytes(bytes(60_000))
    refused = pytest.raises(CheckpointError, match=r"could not be written: .*File too large")
    with full_disk(), refused:
        publish(made, str(target), overwrite=True)
    assert files_in(tmp_path / "local") == {f"model/{n}": b for n, b in before.items()}


def test_a_path_with_nothing_there_is_named(remote: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"), fetch(f"{remote}/nowhere"):
        pass


def test_an_estimator_is_saved_and_loaded_there(remote: str) -> None:
    original = TorchEstimator(
        model=nn.Identity, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, epochs=4
    )
    original.save(f"{remote}/estimator")
    loaded = TorchEstimator.load(f"{remote}/estimator")
    assert loaded.uid == original.uid
    assert loaded.getEpochs() == 4


def test_a_thread_of_pythons_own_finds_it_too(remote: str, made: Path) -> None:
    """No session is active there, and what has no scheme would go to this machine's disk."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(publish, made, f"{remote}/model", overwrite=False).result(60)
    with fetch(f"{remote}/model") as found:
        assert files_in(found) == files_in(made)


def test_a_remote_path_without_a_session_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(
        ConfigError, match=r"hdfs://.* is not a local path, and Hadoop is only there in the driver"
    ):
        publish(made, "hdfs://somewhere/model", overwrite=False)


def test_a_local_path_is_taken_as_spark_takes_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a session."""
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    wrong = []
    for number, scheme in enumerate(("", "file:", "file://")):
        for name in ("run#1", "v?1", "50%20"):
            publish(made, f"{scheme}{tmp_path}/local/{number}/{name}", overwrite=False)
            if files_in(tmp_path / "local" / str(number) / name) != files_in(made):
                wrong.append((scheme, name))
    assert wrong == []
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    publish(made, str(tmp_path / "local" / "model"), overwrite=False)
    assert files_in(tmp_path / "local" / "model") == files_in(made)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def save(store: CheckpointStore, content: bytes) -> None:
    piece = Piece("U8", [len(content)], lambda _: iter([content]))
    store.write({"before": piece, "center": piece}, {"length": len(content)})


def test_checkpoints_are_published_found_verified_and_deleted(remote: str, tmp_path: Path) -> None:
    store = CheckpointStore(f"{remote}/job", keep_last=2, open_elsewhere=open_hadoop)
    contents = [bytes([number]) * 9_000_000 for number in range(3)]
    for content in contents:
        save(store, content)
    store.prune()
    there = sorted(path.name for path in (tmp_path / "remote" / "job").glob("[!.]*"))
    assert there == ["checkpoint-000002.safetensors", "checkpoint-000003.safetensors"]
    saved = CheckpointStore(f"{remote}/job", keep_last=2, open_elsewhere=open_hadoop).newest()
    assert saved is not None
    for size in (1_000_000, 6_000_000):
        assert b"".join(saved.contents["center"].blocks(size)) == contents[-1]


def test_what_is_not_there_is_said_to_be_missing(remote: str) -> None:
    files, root = open_hadoop(remote)
    assert files.get_file_info(f"{root}/nothing").type == fs.FileType.NotFound
    with pytest.raises(OSError, match="FileNotFound"):
        files.open_input_stream(f"{root}/nothing")
    with pytest.raises(OSError, match="refuses to change"):
        files.delete_file(f"{root}/nothing")


@pytest.mark.gate
def test_a_fit_goes_on_from_there(spark: SparkSession, remote: str) -> None:
    rows = frame(spark)
    settings = {"checkpointPath": f"{remote}/fit", "seed": 5}
    estimator(**settings, epochs=1).fit(rows)
    resumed = estimator(**settings, epochs=2).fit(rows)
    assert same_bits(resumed, estimator(seed=5, epochs=2).fit(rows))


def test_a_scheme_that_nobody_knows_is_refused_in_words(spark: SparkSession) -> None:
    for path in ("nosuch://host/path", "dbfs:/mnt/path"):
        with pytest.raises(ConfigError, match=r"cannot be used: .*No FileSystem for scheme"):
            estimator(checkpointPath=path).fit(frame(spark))


@pytest.mark.gate
def test_a_function_cannot_save_there_and_is_told_why(remote: str) -> None:
    def save() -> None:
        sparkdl.current_worker().save_checkpoint(f"{remote}/run", {"epoch": 1})

    with pytest.raises(WorkerError, match=r"no Java .* that all executors have mounted"):
        sparkdl.run(save, num_workers=1)
