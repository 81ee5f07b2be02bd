"""What is sent to executors is deleted once nothing uses it, and travels once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from frames import estimator, frame
from pyspark.sql import DataFrame, SparkSession
from waiting import eventually

import sparkdl
from sparkdl.errors import WorkerError
from sparkdl.spark.closures import sending
from sparkdl.spark.closures.sending import send


def files_of_broadcasts(spark: SparkSession) -> set[Path]:
    return set(Path(spark.sparkContext._temp_dir).iterdir())


@pytest.fixture
def all_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_IN_A_COMMAND", 0)


@pytest.mark.usefixtures("all_is_broadcast")
def test_a_run_leaves_no_broadcast_variable(spark: SparkSession) -> None:
    before = files_of_broadcasts(spark)
    estimator(averagerHost="executor").fit(frame(spark))
    assert sparkdl.run(lambda: 3, num_workers=1) == [3]
    with pytest.raises(WorkerError, match="division by zero"):
        sparkdl.run(lambda: 1 / 0, num_workers=1)
    assert files_of_broadcasts(spark) <= before


def test_what_a_frame_still_needs_stays_and_what_nothing_needs_goes(spark: SparkSession) -> None:
    before = files_of_broadcasts(spark)

    def used() -> DataFrame:
        sent = send(spark, b"a model")

        def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for _ in batches:
                yield pa.record_batch({"told": [sent.value]})

        return spark.range(1).mapInArrow(answer, "told binary")

    def collected() -> set[Path]:
        gc.collect()
        spark.sparkContext._jvm.java.lang.System.gc()  # type: ignore[union-attr]
        send(spark, b"another")
        return files_of_broadcasts(spark) - before

    rows = used()
    (kept,) = files_of_broadcasts(spark) - before
    assert kept in collected()
    assert bytes(rows.collect()[0].told) == b"a model"
    del rows
    assert eventually(lambda: kept not in collected(), 120)


class Session:
    """Stands for one of Spark Connect."""

    __module__ = "pyspark.sql.connect.session"

    def __init__(self, server: Path) -> None:
        self.server, self.received = server, list[bytes]()

    def addArtifacts(self, *paths: str, file: bool) -> None:
        for path in map(Path, paths):
            self.received.append(path.read_bytes())
            (self.server / path.name).write_bytes(path.read_bytes())


def test_a_client_sends_the_same_part_of_a_payload_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PIECE_BYTES", 4)
    monkeypatch.setattr(sending.SparkFiles, "get", lambda name: str(tmp_path / name))
    session = Session(tmp_path)
    for content, received in {
        b"": [],
        b"aaa": [],
        b"aaaabbbbcc": [b"aaaa", b"bbbb"],
        b"aaaabbbbdd": [],
        b"aaaaeeeecc": [b"eeee"],
        b"ffffffff": [b"ffff"],
    }.items():
        session.received.clear()
        sent = send(session, content)  # type: ignore[arg-type]
        assert (sent.value, session.received) == (content, received)
    other = Session(tmp_path)
    send(other, b"aaaabbbb")  # type: ignore[arg-type]
    assert other.received == [b"aaaa"]
    monkeypatch.setattr(sending, "MOST_IN_A_TASK", 0)
    assert send(session, b"aaaazz").value == b"aaaazz"  # type: ignore[arg-type]
    assert session.received == [b"ffff", b"zz"]
