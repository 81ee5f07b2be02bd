"""Broadcast variables have their values in the user's functions; accumulators count in runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

import sparkdl
from sparkdl import GradientAllReduce, TorchDistributor, TorchEstimator, TorchModel
from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.object_spec import LOSS, load_object, save_object
from sparkdl.errors import ConfigError, ModelError, WorkerError

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
def frame(spark: SparkSession) -> DataFrame:
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
def test_a_fits_functions_read_broadcast_variables(spark: SparkSession, frame: DataFrame) -> None:
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
    ).fit(frame)
    assert model.transform(frame).count() == ROWS


def test_an_accumulator_is_named_where_its_count_would_be_up_to_chance(
    spark: SparkSession, frame: DataFrame
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
            TorchEstimator(model=model, loss=loss, **settings).fit(frame)
    with pytest.raises(ModelError, match=r"an accumulator, .* sum up a column"):
        TorchModel.from_module(counting, torch.zeros(1, 1)).transform(frame)


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
    spark: SparkSession, frame: DataFrame
) -> None:
    module = Scaled(spark.sparkContext.broadcast(2.0))
    predict = TorchModel.from_module(module, torch.zeros(1, 1)).udf()
    frame.select(F.udf(lambda x: x, "float")("label")).collect()  # pickled after the model
    with torch.no_grad():
        expected = [module(torch.tensor([[row.label]])).item() for row in frame.collect()]
    found = [row[0] for row in frame.select(predict("features")).collect()]
    assert found == pytest.approx(expected)


@pytest.mark.gate
def test_a_destroyed_broadcast_variable_is_named_and_harms_no_other_function(
    spark: SparkSession, frame: DataFrame
) -> None:
    gone, kept = spark.sparkContext.broadcast(1), spark.sparkContext.broadcast(2)
    assert sparkdl.run(lambda: gone.value, num_workers=1) == [1]
    gone.destroy()
    with pytest.raises(ConfigError, match=r"variable 'gone'.*destroyed"):
        sparkdl.run(lambda: gone.value, num_workers=1)
    assert frame.select(F.udf(lambda x: kept.value, "int")("label")).first() == (2,)


def test_what_exists_only_in_the_driver_is_named_before_any_job(
    spark: SparkSession, frame: DataFrame
) -> None:
    context, rdd, column = spark.sparkContext, spark.sparkContext.emptyRDD(), F.col("label")
    holder = {"frames": [frame]}
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (lambda: frame.count(), (), "variable 'frame'.* is a DataFrame"),
        (lambda: spark.range(1), (), "variable 'spark'.* is a SparkSession"),
        (lambda: context.version, (), "variable 'context'.* is a SparkContext"),
        (lambda: rdd, (), "variable 'rdd'.* is a RDD"),
        (lambda: column, (), "variable 'column'.* is a Column"),
        (lambda: holder, (), r"variable 'holder'.*\['frames'\]\[0\] is a DataFrame"),
        (lambda rows: rows, (frame,), "argument 'rows' is a DataFrame"),
        (print, (1, frame), "argument .* is a DataFrame"),
    ]
    for function, arguments, named in refused:
        with pytest.raises(ConfigError, match=f"(?s){named} that exists only in the driver"):
            sparkdl.run(function, *arguments, num_workers=1)
    with pytest.raises(ConfigError, match="variable 'rdd'"):
        TorchDistributor(1, local_mode=False, use_gpu=False).run(lambda: rdd)
    fit = TorchEstimator(
        model=partial(nn.Linear, 1, 1),
        loss=lambda outputs, targets: outputs.sum() + frame.count(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    ).fit
    with pytest.raises(ModelError, match=r"loss .*variable 'frame'.* is a DataFrame that exists"):
        fit(frame)
