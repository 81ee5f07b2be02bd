"""Predictions of a batch, and the model that tasks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from frames import CLASSES, configured, estimator, frame, in_files, same_bits
from pyspark.errors import PySparkException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from subprocesses import printed_by
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.spark.inference.failures import told_in_driver
from sparkdl.spark.inference.predictor import (
    Labels,
    OutputColumn,
    PredictionSettings,
    Predictor,
    Running,
    Score,
)
from sparkdl.spark.session import DEFAULTS


class Silent(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, *features: Tensor, **named: Tensor) -> Tensor:
        raise self.error


def predictions_of(
    module: nn.Module,
    columns: list[tuple[ColumnSpec, pa.Array]],
    monkeypatch: pytest.MonkeyPatch,
    outputs: int = 1,
    **changes: Any,
) -> list[Any]:
    """What a predictor makes of one record batch, without Spark."""
    settings: dict[str, Any] = {"names": None, "as_kwargs": False, "score": None, **changes}
    common = {"device": "cpu", "dtype": None, "compiled": False, "double": True}
    common["batch_rows"] = settings.pop("batch_rows")
    predictor = Predictor(
        model=None,  # type: ignore[arg-type] # it is loaded here
        outputs=[OutputColumn("prediction", None, lambda output: output, wide=True)] * outputs,
        settings=TorchSettings.here(),
        **{"prediction": PredictionSettings(**common), **settings},  # type: ignore[arg-type]
    )

    @contextmanager
    def running(self: Predictor) -> Iterator[Any]:
        yield Running(self, module, "cpu")

    monkeypatch.setattr(Predictor, "running", running)
    specs, arrays = ([each[k] for each in columns] for k in (0, 1))
    return list(predictor.predictions(iter([(arrays, specs)])))


def predict(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch, score: Score | None = None
) -> list[Any]:
    """Predict for five rows in batches of three."""
    pixels = pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32()))
    columns = [
        (ColumnSpec("pixels", torch.float32, (2,)), pixels),
        (ColumnSpec("age", torch.float32), pa.array([3.0] * 5, pa.float32())),
    ]
    if score is not None:
        label = ColumnSpec("label", torch.float32)
        columns.append((label, pa.array([0.0] * 5, pa.float32())))
    pickled = None if score is None else cloudpickle.dumps(score)
    return predictions_of(module, columns, monkeypatch, 2, batch_rows=3, score=pickled)


@every_row(
    (RuntimeError("shapes"), "RuntimeError: shapes"),
    (Silent(), "Silent: <exception str() failed>"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SystemExit(3), "SystemExit: 3"),
    (ValueError("half \ud800"), "ValueError: half"),
    (ValueError("long" * 5_000_000), "ValueError: longlong"),
    (ModuleNotFoundError("No module named 'a'", name="a"), "addPyFile"),
)
def test_a_failing_forward_is_named_with_its_batch(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, told: str
) -> None:
    named = r"the model Fails fails on 3 rows \('pixels' float32 \(3, 2\), 'age' float32 \(3,\)\): "
    with pytest.raises(ModelError, match=f"^{named}") as caught:
        predict(Fails(error), monkeypatch)
    assert told in str(caught.value)
    assert "in forward" in str(caught.value)
    assert len(str(caught.value).encode()) < 30_000
    assert caught.value.__suppress_context__  # Spark would pass on its text too, of any length


def test_a_failing_loss_is_named_with_outputs_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Width(nn.Module):
        def forward(self, pixels: Tensor, age: Tensor) -> Tensor:
            return pixels

    def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        raise Silent

    score = Score(loss, Labels([ColumnSpec("label", torch.float32)], as_one=True))
    told = r"lossCol, fails on outputs float32 \(3, 2\) and targets float32 \(3,\): \S*Silent: <exc"
    with pytest.raises(ModelError, match=told):
        predict(Width(), monkeypatch, score)


class Halved(nn.Module):
    def forward(self, pixels: Tensor, age: Tensor) -> Tensor:
        return (pixels / 4).bfloat16()


@every("loss", [nn.BCELoss(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))])
def test_a_loss_is_given_outputs_as_in_training_under_half_precision(
    loss: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = torch.float32 if isinstance(loss, nn.BCELoss) else torch.int64
    score = cloudpickle.dumps(Score(loss, Labels([ColumnSpec("label", kind)], as_one=True)))
    width = 1 if kind is torch.float32 else 2
    values = [[1.0, 2.0][:width], [3.0, 1.0][:width]]
    columns = [
        (ColumnSpec("pixels", torch.float32, (width,)), pa.array(values)),
        (ColumnSpec("age", torch.float32), pa.array([3.0, 3.0])),
        (ColumnSpec("label", kind), pa.array([1.0, 0.0])),
    ]
    prediction = PredictionSettings(8, "cpu", torch.bfloat16, compiled=False, double=True)
    ((_, found),) = predictions_of(
        Halved(), columns, monkeypatch, 2, batch_rows=8, prediction=prediction, score=score
    )
    loss.reduction = "none"
    labels = torch.tensor([1, 0]).to(kind)
    expected = loss((torch.tensor(values) / 4).squeeze(-1), labels)
    np.testing.assert_allclose(found.flatten(), expected, rtol=1e-6)


TOLD_BY_SPARK = """Job aborted due to stage failure: Task 0 in stage 9.0 failed 4 times
Traceback (most recent call last):
  File "predictor.py", line 222, in outputs
    raise as_model_error(
sparkdl.errors.{kind}: the model Net fails on 6 rows: KeyError: 'lost'

Traceback (most recent call last):
  File "mine.py", line 3, in forward
KeyError: 'lost'

	at org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""


@every("kind", [ModelError, DataError])
def test_what_a_task_raised_on_purpose_is_raised_in_the_driver(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, told_in_driver():
        raise PySparkException(TOLD_BY_SPARK.format(kind=kind.__name__))
    assert str(caught.value).startswith("the model Net fails on 6 rows: KeyError: 'lost'\n")
    assert str(caught.value).endswith("in forward\nKeyError: 'lost'")
    assert isinstance(caught.value.__cause__, PySparkException)


def test_any_other_error_of_spark_stays_sparks() -> None:
    for text in ("[FAILED_READ_FILE] no file", TOLD_BY_SPARK.format(kind="StoppedError")):
        with pytest.raises(PySparkException) as caught, told_in_driver():
            raise PySparkException(text)
        assert str(caught.value) == text


ROWS = 23


class Sum(nn.Module):
    """The sum of a row's real tokens and its number, and the width that it was padded to."""

    def forward(self, *, tokens: Tensor, age: Tensor, attention_mask: Tensor) -> Tensor:
        total = (tokens * attention_mask).sum(1) + age
        return torch.stack([total, torch.full_like(total, tokens.shape[1])], dim=1)


def test_predictions_come_in_the_order_of_the_rows_whatever_their_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = np.random.default_rng(2)
    rows = [drawn.integers(1, 9, drawn.integers(0, 20)).tolist() for _ in range(ROWS)]
    ages = drawn.normal(size=ROWS)
    padded = Padding(5, "attention_mask")
    columns = [
        (ColumnSpec("tokens", torch.float64, (UNKNOWN,), padding=padded), pa.array(rows)),
        (ColumnSpec("age", torch.float64), pa.array(ages)),
    ]
    named = {"names": ["tokens", "age"], "as_kwargs": True}
    ((found,),) = predictions_of(Sum(), columns, monkeypatch, batch_rows=4, **named)
    totals, widths = np.array(found.to_pylist()).T
    assert np.allclose(totals, [sum(row) + age for row, age in zip(rows, ages, strict=True)])
    # Four rows of about one length at a time, each padded to the longest of the four.
    lengths = sorted(len(row) for row in rows)
    longest = [max(1, *lengths[k : k + 4]) for k in range(0, ROWS, 4)]
    assert sorted(set(widths)) == sorted(set(longest))


class AsItIs(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given


def test_results_and_features_that_become_infinite_on_their_way_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = [(ColumnSpec("x", torch.float64, (2,)), pa.array([[1.0, 2.0], [0.5, 1e39]]))]
    settings = partial(PredictionSettings, batch_rows=8, device="cpu", compiled=False)
    for dtype, double, told in (
        (None, False, r"'prediction' would hold 1e\+39 .*float32 cannot hold.*predictionDtype"),
        (torch.float16, True, r"'x' holds 1e\+39 \(float64\) .*predictPrecision.*float16"),
    ):
        prediction = settings(dtype=dtype, double=double)
        with pytest.raises(DataError, match=told):
            predictions_of(AsItIs(), columns, monkeypatch, batch_rows=8, prediction=prediction)
    ((found,),) = predictions_of(AsItIs(), columns, monkeypatch, batch_rows=8)
    assert found.to_pylist() == [[1.0, 2.0], [0.5, 1e39]]


def test_half_precision_changes_no_result_that_is_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = PredictionSettings(8, "cpu", torch.bfloat16, compiled=False, double=True)
    for wider in (torch.tensor([2**24 + 1, 5]), torch.tensor([1e300, 0.1], dtype=torch.float64)):
        module = Returns(wider)
        columns = [(ColumnSpec("x", torch.float32, (2,)), pa.array([[1.0, 2.0], [3.0, 4.0]]))]
        ((found,),) = predictions_of(
            module, columns, monkeypatch, batch_rows=8, prediction=prediction
        )
        assert found.flatten().to_pylist() == wider.tolist()


class UpToTheLargest(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given[:, : int(given.max())]


def test_a_width_that_depends_on_the_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.array([[2.0, 2.0, 2.0], [1.0, 3.0, 1.0]])
    columns = [(ColumnSpec("x", torch.float32, (3,)), rows)]
    with pytest.raises(ModelError, match=r"2 numbers per row for column 'prediction' .* 3 in"):
        predictions_of(UpToTheLargest(), columns, monkeypatch, batch_rows=1)


class Returns(nn.Module):
    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, given: Tensor) -> Tensor:
        return self.outputs


def test_whole_results_are_written_as_they_are_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = partial(PredictionSettings, batch_rows=8, device="cpu", compiled=False)
    for largest, double in ((2**24, False), (2**53, True)):
        prediction = settings(dtype=None, double=double)
        for number in (largest, largest + 1):
            columns = [(ColumnSpec("x", torch.int64, (2,)), pa.array([[1, 2], [3, number]]))]
            ids = partial(predictions_of, AsItIs(), columns, monkeypatch, prediction=prediction)
            if number == largest:
                ((found,),) = ids(batch_rows=8)
                assert found.to_pylist() == [[1.0, 2.0], [3.0, float(number)]]
            else:
                with pytest.raises(DataError, match=rf"would hold {number} \(int64\), which float"):
                    ids(batch_rows=8)


def test_a_label_that_is_no_class_index_is_refused() -> None:
    labels = Labels([ColumnSpec("label", torch.int64)], as_one=True)
    for number in (0.5, float("nan"), 1e30):
        with pytest.raises(DataError, match=r"'label' holds .* in row 1 .* int64, .* cannot hold"):
            labels.tensors([pa.array([1.0, number])])
    large = 2**60 + 1
    assert labels.tensors([pa.array([large])])[0].tolist() == [large]


NOT_NEEDED = ("sparkdl.estimator.estimator", "sparkdl.strategies", "sparkdl.driver", "pyspark.ml")
FOUR_TASKS = f"""
import gc
import sys
from types import SimpleNamespace
from torch import nn
import sparkdl.estimator.head, sparkdl.spark.inference.predictor
from sparkdl.checkpoint.portable import pickled_module
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.spark.inference.shared_model import SharedModel, loaded

print(*(name for name in {NOT_NEEDED} if name in sys.modules))
for key in "aabb":
    pickled = SimpleNamespace(value=pickled_module(nn.Linear(1, 1), None))
    shared = SharedModel(key, pickled, None)
    with loaded(shared, "cpu", None, TorchSettings.here(), compiled=False):
        print(gc.get_freeze_count())
"""


def test_tasks_import_nothing_of_training_and_collections_spare_their_model() -> None:
    """Until another one comes."""
    imported, *counts = printed_by("-c", FOUR_TASKS).splitlines()
    assert imported == ""
    spared = [int(line) for line in counts]
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


class CountsInAllWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(made() for made in COUNTING)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).amax(0)


def test_every_transform_begins_with_the_module_as_it_is_here(rows: DataFrame) -> None:
    model = TorchModel.from_module(CountsInAllWays(), torch.zeros(1))
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


RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


@pytest.mark.gate
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


def test_columns_of_files_become_rows_in_compiled_code_in_a_session_of_create_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = spark.range(0, 90, 1, 2).selectExpr("array(cast(id as float)) features")
    rows = in_files(made, tmp_path / "table")
    model = TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
    with configured(spark, {COLUMNAR: DEFAULTS[COLUMNAR]}):
        plan = model.transform(rows)._jdf.queryExecution().executedPlan().toString()
    assert "ColumnarToRow" in plan.split("ArrowEvalPython")[1]


def test_a_function_that_makes_vectors_is_called_once_a_row(spark: SparkSession) -> None:
    calls = spark.sparkContext.accumulator(0)

    def vector(id: int) -> Any:
        calls.add(1)
        return Vectors.dense([float(id)])

    made = F.udf(vector, VectorUDT(), useArrow=False)
    rows = spark.range(0, 90, 1, 2).select(made("id").alias("features"))
    model = TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
    with configured(spark, {COLUMNAR: DEFAULTS[COLUMNAR]}):
        assert len(model.transform(rows).select("prediction").collect()) == 90
    assert calls.value == 90


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
