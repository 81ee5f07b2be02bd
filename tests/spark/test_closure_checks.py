"""Closures: what is refused, how they are sent, and what they share."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from every_row import every_row
from frames import estimator, frame
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from waiting import eventually

import sparkdl
from sparkdl import GradientAllReduce, TorchDistributor, TorchEstimator, TorchModel
from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.object_spec import LOSS, load_object, save_object
from sparkdl.errors import ConfigError, ModelError, WorkerError
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


@every_row(
    (nn.Sequential(nn.Linear(2, 2), nn.Sequential(Net(guard=threading.Lock()))), ".1.0.guard"),
    (Net(helper=NeedsLock(threading.Lock())), ".helper.lock"),
    (Net(parts=[1, {"x": threading.Lock()}]), ".parts[1]['x']"),
    (Net(pair=(threading.Lock(), 2)), ".pair[0]"),
    (holding(threading.Lock()), " (its variable 'guard')"),
    (partial(Net, note=threading.Lock()), ".keywords['note']"),
    (partial(NeedsLock, threading.Lock()), ".args[0]"),
    (partial(holding(threading.Lock()), width=3), ".func (its variable 'guard')"),
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
        self.conf = {sending.ISOLATION: "true"}

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


def test_no_file_is_sent_to_a_server_that_shares_files_among_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MOST_IN_A_TASK", 4)
    monkeypatch.setattr(sending, "MOST_WITHOUT_FILES", 8)
    session = Session(tmp_path)
    session.conf[sending.ISOLATION] = "false"
    assert send(session, b"aaaabbbb").value == b"aaaabbbb"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Start the server with spark\.sql\.artifact\.isolation"):
        send(session, b"aaaabbbbc")  # type: ignore[arg-type]
    assert not session.received


cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 24


class Joined(AccumulatorParam[list[int]]):
    def zero(self, value: list[int]) -> list[int]:
        return []

    def addInPlace(self, value1: list[int], value2: list[int]) -> list[int]:
        return [*value1, *value2]


class Scaled(nn.Module):
    """Multiplies by a broadcast variable, which is read when it is called."""

    def __init__(self, scale: Any, rows: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.scale, self.rows = scale, rows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is not None:
            self.rows.add(len(x))
        return self.layer(x) * self.scale.value


@pytest.fixture
def table(spark: SparkSession) -> DataFrame:
    number = F.col("id").cast("float") / ROWS
    return spark.range(ROWS).select(F.array(number).alias("features"), number.alias("label"))


@pytest.mark.versions
def test_broadcast_variables_have_their_values_in_run(spark: SparkSession) -> None:
    context = spark.sparkContext
    inside, given = context.broadcast({"rate": 2.0}), context.broadcast([1, 2])

    def read(first: Any, *, others: dict[str, list[Any]]) -> Any:
        return inside.value["rate"], first.value, others["all"][0].value

    told = sparkdl.run(read, given, num_workers=2, others={"all": [given]})
    assert told == [(2.0, [1, 2], [1, 2])] * 2
    later = context.broadcast(3)
    run = TorchDistributor(1, local_mode=False, use_gpu=False).run
    assert run(lambda: later.value) == 3


@pytest.mark.versions
def test_what_every_rank_adds_to_accumulators_is_counted_once(spark: SparkSession) -> None:
    count, ranks = spark.sparkContext.accumulator(0), spark.sparkContext.accumulator([], Joined())

    def add(failing: int | None) -> None:
        rank = sparkdl.current_worker().rank
        count.add(1)
        ranks.add([rank])
        if rank == failing:
            raise ValueError("not counted")

    sparkdl.run(add, None, num_workers=2)
    assert (count.value, sorted(ranks.value)) == (2, [0, 1])
    with pytest.raises(WorkerError, match="not counted"):
        sparkdl.run(add, 0, num_workers=1)
    assert (count.value, sorted(ranks.value)) == (2, [0, 1])


@pytest.mark.versions
def test_a_fits_functions_read_broadcast_variables(spark: SparkSession, table: DataFrame) -> None:
    scale, one = spark.sparkContext.broadcast(2.0), spark.sparkContext.broadcast(1.0)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(-1) - targets.reshape(-1)).square().mean() * one.value

    model = TorchEstimator(
        model=lambda: Scaled(scale),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=GradientAllReduce(),
        batchSize=ROWS // 6,
        numWorkers=2,
        progress=False,
    ).fit(table)
    assert model.transform(table).count() == ROWS


def test_an_accumulator_is_named_where_its_count_would_be_up_to_chance(
    spark: SparkSession, table: DataFrame
) -> None:
    rows = spark.sparkContext.accumulator(0)
    counting = Scaled(spark.sparkContext.broadcast(2.0), rows)
    settings: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "numWorkers": 1}
    refused: list[tuple[Any, Any, str]] = [
        (counting, nn.MSELoss(), r"model\.rows"),
        (partial(nn.Linear, 1, 1), lambda x, y: rows.add(1), "loss .*variable 'rows'.*"),
    ]
    for model, loss, named in refused:
        with pytest.raises(ModelError, match=f"{named} is an accumulator, .*'metrics'"):
            TorchEstimator(model=model, loss=loss, **settings).fit(table)
    with pytest.raises(ModelError, match=r"an accumulator, .* sum up a column"):
        TorchModel.from_module(counting, torch.zeros(1, 1)).transform(table)


def test_a_training_and_what_is_saved_have_a_broadcast_variables_value(
    spark: SparkSession, tmp_path: Path
) -> None:
    def uses(value: Any) -> Any:
        sent = spark.sparkContext.broadcast(value)
        return lambda: sent.value

    first, same, other = (describe(uses(each)) for each in (5, 5, 6))
    assert first == same != other
    saved = save_object(uses(5), tmp_path, "loss")
    assert load_object(saved, tmp_path, "loss", expected=LOSS, trust=True)() == 5


def test_a_model_as_a_function_has_its_broadcast_variables_whatever_was_called_before(
    spark: SparkSession, table: DataFrame
) -> None:
    module = Scaled(spark.sparkContext.broadcast(2.0))
    predict = TorchModel.from_module(module, torch.zeros(1, 1)).udf()
    table.select(F.udf(lambda x: x, "float")("label")).collect()  # pickled after the model
    with torch.no_grad():
        expected = [module(torch.tensor([[row.label]])).item() for row in table.collect()]
    found = [row[0] for row in table.select(predict("features")).collect()]
    assert found == pytest.approx(expected)


@pytest.mark.gate
def test_a_destroyed_broadcast_variable_is_named_and_harms_no_other_function(
    spark: SparkSession, table: DataFrame
) -> None:
    gone, kept = spark.sparkContext.broadcast(1), spark.sparkContext.broadcast(2)
    assert sparkdl.run(lambda: gone.value, num_workers=1) == [1]
    gone.destroy()
    with pytest.raises(ConfigError, match=r"variable 'gone'.*destroyed"):
        sparkdl.run(lambda: gone.value, num_workers=1)
    assert table.select(F.udf(lambda x: kept.value, "int")("label")).first() == (2,)


def test_what_exists_only_in_the_driver_is_named_before_any_job(
    spark: SparkSession, table: DataFrame
) -> None:
    context, rdd, column = spark.sparkContext, spark.sparkContext.emptyRDD(), F.col("label")
    holder = {"frames": [table]}
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (lambda: table.count(), (), "variable 'table'.* is a DataFrame"),
        (lambda: spark.range(1), (), "variable 'spark'.* is a SparkSession"),
        (lambda: context.version, (), "variable 'context'.* is a SparkContext"),
        (lambda: rdd, (), "variable 'rdd'.* is a RDD"),
        (lambda: column, (), "variable 'column'.* is a Column"),
        (lambda: holder, (), r"variable 'holder'.*\['frames'\]\[0\] is a DataFrame"),
        (lambda rows: rows, (table,), "argument 'rows' is a DataFrame"),
        (print, (1, table), "argument .* is a DataFrame"),
    ]
    for function, arguments, named in refused:
        with pytest.raises(ConfigError, match=f"(?s){named} that exists only in the driver"):
            sparkdl.run(function, *arguments, num_workers=1)
    with pytest.raises(ConfigError, match="variable 'rdd'"):
        TorchDistributor(1, local_mode=False, use_gpu=False).run(lambda: rdd)
    fit = TorchEstimator(
        model=partial(nn.Linear, 1, 1),
        loss=lambda outputs, targets: outputs.sum() + table.count(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    ).fit
    with pytest.raises(ModelError, match=r"loss .*variable 'table'.* is a DataFrame that exists"):
        fit(table)
