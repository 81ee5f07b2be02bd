"""Closures: what is refused, and how they are sent."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from every_row import every
from frames import estimator, frame
from pyspark.sql import DataFrame, SparkSession
from torch import nn
from waiting import eventually

import sparkdl
from sparkdl.errors import ModelError, WorkerError
from sparkdl.spark import sending
from sparkdl.spark.pickling import require_picklable
from sparkdl.spark.sending import send


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


class NeedsLock:
    def __init__(self, lock: Any) -> None:
        self.lock = lock


def message(value: Any) -> str:
    with pytest.raises(ModelError) as caught:
        require_picklable("model", value)
    return str(caught.value)


def test_what_can_travel_passes() -> None:
    for value in (
        Net(),
        Net,
        partial(Net, note=3),
        lambda: Net(),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        {"a": [Net()]},
    ):
        require_picklable("model", value)


def test_an_attribute_is_named_with_its_type_and_the_fix() -> None:
    text = message(Net(guard=threading.Lock()))
    assert "model cannot be sent to the executors: model.guard is a lock" in text
    assert "__getstate__" in text


def holding(guard: Any) -> Any:
    def build(width: int) -> Any:
        return guard

    return build


@every(
    ("value", "place"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(Net(guard=threading.Lock()))), ".1.0.guard"),
        (Net(helper=NeedsLock(threading.Lock())), ".helper.lock"),
        (Net(parts=[1, {"x": threading.Lock()}]), ".parts[1]['x']"),
        (Net(pair=(threading.Lock(), 2)), ".pair[0]"),
        (holding(threading.Lock()), " (its variable 'guard')"),
        (partial(Net, note=threading.Lock()), ".keywords['note']"),
        (partial(NeedsLock, threading.Lock()), ".args[0]"),
        (partial(holding(threading.Lock()), width=3), ".func (its variable 'guard')"),
    ],
)
def test_what_cannot_travel_is_named_by_its_place(value: Any, place: str) -> None:
    assert f"model{place} is a lock" in message(value)


def test_an_open_file_is_named_with_its_type(tmp_path: Any) -> None:
    with open(tmp_path / "log.txt", "w") as log:
        assert "model.log is a TextIOWrapper" in message(Net(log=log))


def test_the_reason_of_an_object_that_refuses_is_shown() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    text = message(Net(part=Refuses()))
    assert "model.part is a Refuses" in text
    assert "not me" in text


def test_the_param_is_named() -> None:
    with pytest.raises(ModelError, match=r"^optimizer cannot be sent to the executors"):
        require_picklable("optimizer", partial(torch.optim.SGD, lr=threading.Lock()))


def test_a_closure_variable_that_is_not_yet_bound_does_not_hide_the_culprit() -> None:
    guard = threading.Lock()

    def build() -> Any:
        return (later, guard)

    text = message(build)
    later = 1  # bound only now
    assert "guard" in text
    assert later == 1


def test_objects_that_hold_each_other_do_not_search_forever() -> None:
    first, second = NeedsLock(None), NeedsLock(threading.Lock())
    first.lock, second.other = second, first  # type: ignore[attr-defined]
    assert "lock" in message(first)


LOCK = threading.Lock()


class Helper:
    __slots__ = ("lock",)

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def call(self) -> Any:
        return self.lock

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Helper, (self.lock,)


def test_whatever_a_function_can_refer_to_is_named() -> None:
    def uses_global() -> Any:
        return uses_global, [LOCK for _ in range(1)]

    def has_default(guard: Any = LOCK) -> Any:
        return guard

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.guard = LOCK

        @staticmethod
        def shared() -> Any:
            return LOCK

    found = {
        r"model \(its global variable 'LOCK'\)": uses_global,
        "a default of its arguments": has_default,
        "__init__ .its global variable 'LOCK'": Uses,
        r"model\.__self__\.lock is": Helper(LOCK).call,
        r"model\.lock is": Helper(LOCK),
        r"element .*\.lock is": {Helper(LOCK)},
    }
    for named, value in found.items():
        with pytest.raises(ModelError, match=f"{named}.* a lock"):
            require_picklable("model", value)


def files_of_broadcasts(spark: SparkSession) -> set[Path]:
    return set(Path(spark.sparkContext._temp_dir).iterdir())


@pytest.fixture
def all_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_IN_A_COMMAND", 0)


@pytest.mark.usefixtures("all_is_broadcast")
def test_a_run_leaves_no_broadcast_variable(spark: SparkSession) -> None:
    before = files_of_broadcasts(spark)
    estimator().fit(frame(spark))
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
