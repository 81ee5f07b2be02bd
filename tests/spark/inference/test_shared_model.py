"""Models in the workers that predict."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from every_row import every
from frames import CLASSES, configured, estimator, frame, in_files, same_bits
from pyspark.sql import DataFrame, SparkSession
from subprocesses import printed_by
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import TorchModel
from sparkdl.errors import ConfigError

FOUR_TASKS = """
import gc
from types import SimpleNamespace
from torch import nn
from sparkdl.checkpoint.portable import pickled_module
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.spark.inference.shared_model import SharedModel, loaded

for key in "aabb":
    pickled = SimpleNamespace(value=pickled_module(nn.Linear(1, 1), None))
    shared = SharedModel(key, pickled, None)
    with loaded(shared, "cpu", None, TorchSettings.here(), compiled=False):
        print(gc.get_freeze_count())
"""


def test_collections_spare_a_model_until_another_one_comes() -> None:
    spared = [int(line) for line in printed_by("-c", FOUR_TASKS).split()]
    assert spared[0] == spared[2] == 0
    assert min(spared[1], spared[3]) > 100_000  # torch alone has as many objects


cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRANSFORMS = 4
"""More than executors, so that some Python process predicts twice."""


class CountsInBuffer(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls.expand(len(x))


class ReplacesBuffer(CountsInBuffer):
    """Puts another tensor in a buffer's place."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.calls.expand(len(x))


class CountsInAttribute(nn.Module):
    """Adds to a number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(x),), float(self.calls))


class Remembers(nn.Module):
    """Keeps what it has seen in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.full((len(x),), float(len(self.seen)))


class CountsInLayer(nn.Module):
    """Has a layer that counts, on a parameter that it has to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = CountsInBuffer(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


COUNTING = [CountsInBuffer, ReplacesBuffer, CountsInAttribute, Remembers, CountsInLayer]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(3).selectExpr("double(id) AS features").coalesce(1).cache()


@every("made", COUNTING)
def test_every_transform_begins_with_the_module_as_it_is_here(
    rows: DataFrame, made: Callable[[], nn.Module]
) -> None:
    model = TorchModel.from_module(made(), torch.zeros(1))
    predicted = [
        [row.prediction for row in model.transform(rows).collect()] for _ in range(TRANSFORMS)
    ]
    assert predicted == [[1.0] * 3] * TRANSFORMS


@every("made", COUNTING)
def test_learning_what_a_module_returns_leaves_it_as_it_was(made: Callable[[], nn.Module]) -> None:
    module = made()
    TorchModel.from_module(module, torch.zeros(1))
    assert module(torch.zeros(1)).tolist() == [1.0]


@pytest.mark.nightly
def test_a_state_brought_from_the_driver_is_where_every_transform_begins(rows: DataFrame) -> None:
    module = CountsInBuffer()
    model = TorchModel.from_module(module, torch.zeros(1))
    module.calls.fill_(5.0)
    found = {model.transform(rows).first()["prediction"] for _ in range(TRANSFORMS)}  # type: ignore[index]
    assert found == {6.0}


def test_lazy_layers_stay_what_the_example_has_made_of_them() -> None:
    module = nn.LazyLinear(2)
    TorchModel.from_module(module, torch.zeros(1, 3))
    assert module.weight.shape == (2, 3)


TIMEOUT_SECONDS = 120.0
SENT = (
    "sparkdl.spark.inference.predictor",
    "sparkdl.estimator.head",
)
NOT_NEEDED = ("sparkdl.estimator.estimator", "sparkdl.strategies", "sparkdl.driver", "pyspark.ml")


def test_predicting_imports_nothing_that_only_training_needs() -> None:
    script = (
        f"import importlib, sys\n"
        f"for name in {SENT}: importlib.import_module(name)\n"
        f"print(*(name for name in {NOT_NEEDED} if name in sys.modules))"
    )
    printed = printed_by("-c", script, timeout=TIMEOUT_SECONDS)
    assert printed.split() == []


RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def test_without_a_limit_of_rows_predictions_end(spark: SparkSession, tmp_path: Path) -> None:
    """Spark 4.3.0 passes columnar rows to Python in batches of 0 rows, for ever."""
    made = spark.range(0, 90, 1, 2).selectExpr("array(cast(id as float)) features")
    rows = in_files(made, tmp_path / "table").selectExpr("features as features")
    model = TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
    for limit in ("0", "-1"):
        with configured(spark, {RECORDS: limit}):
            added = model.transform(rows)
            plan = added._jdf.queryExecution().executedPlan().toString()
            assert "Filter" in plan.split("ArrowEvalPython")[1]  # which passes on rows only
            with pytest.raises(ConfigError, match=f"{RECORDS} is {limit}.*{COLUMNAR}"):
                model.udf()
            assert len(added.select("prediction").collect()) == 90
    with configured(spark, {RECORDS: "-1", COLUMNAR: "false"}):
        assert rows.select(model.udf()("features")).count() == 90


@pytest.mark.nightly
@every("kept", ["in files", "in memory"])
def test_without_a_limit_of_rows_fits_and_evaluations_are_the_same(
    spark: SparkSession, tmp_path: Path, kept: str
) -> None:
    """Both are columnar; Spark passes them on to functions of whole partitions."""
    made = frame(spark, rows=90, partitions=2)
    rows = in_files(made, tmp_path / "table") if kept == "in files" else made.cache()
    wanted = estimator(shuffleRows="none").fit(rows)
    accuracy = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    measured = wanted.evaluate(rows, accuracy)
    with configured(spark, {RECORDS: "0"}):
        assert same_bits(estimator(shuffleRows="none").fit(rows), wanted)
        assert wanted.evaluate(rows, accuracy) == measured
    made.unpersist()
