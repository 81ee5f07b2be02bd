"""A model or loss that fails in a task is named with what it was given, whatever it raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from pyspark.errors import PySparkException
from torch import Tensor, nn

from sparkdl.errors import DataError, ModelError
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.failures import told_in_driver
from sparkdl.spark.inference.predictor import OutputColumn, PredictionSettings, Predictor, Running
from sparkdl.spark.inference.scores import Labels, Score


class Silent(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Fails(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, *features: Tensor, **named: Tensor) -> Tensor:
        raise self.error


def predict(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch, score: Score | None = None
) -> list[Any]:
    """Predict for five rows in batches of three."""
    specs = [ColumnSpec("pixels", torch.float32, (2,)), ColumnSpec("age", torch.float32)]
    predictor = Predictor(
        model=None,  # type: ignore[arg-type] # it is loaded here
        outputs=[OutputColumn("prediction", None, lambda output: output, wide=True)] * 2,
        names=None,
        as_kwargs=False,
        prediction=PredictionSettings(
            batch_rows=3, device="cpu", dtype=None, compiled=False, double=True
        ),
        settings=TorchSettings.here(),
        score=None if score is None else cloudpickle.dumps(score),
    )

    @contextmanager
    def running(self: Predictor) -> Iterator[Any]:
        yield Running(self, module, "cpu")

    monkeypatch.setattr(Predictor, "running", running)
    columns = [
        pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32())),
        pa.array([3.0] * 5, pa.float32()),
    ]
    if score is not None:
        columns.append(pa.array([0.0] * 5, pa.float32()))
        specs.append(ColumnSpec("label", torch.float32))
    return list(predictor.predictions(iter([(columns, specs)])))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("shapes"), "RuntimeError: shapes"),
        (Silent(), "Silent: <exception str() failed>"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("half \ud800"), "ValueError: half"),
        (ValueError("long" * 5_000_000), "ValueError: longlong"),
        (ModuleNotFoundError("No module named 'a'", name="a"), "addPyFile"),
    ],
)
def test_a_failing_forward_is_named_with_its_batch(
    error: BaseException, told: str, monkeypatch: pytest.MonkeyPatch
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

    score = Score(loss, Labels([ColumnSpec("label", torch.float32)], as_one=True), None)
    told = (
        r"scoreCol, fails on outputs float32 \(3, 2\) and targets float32 \(3,\): \S*Silent: <exc"
    )
    with pytest.raises(ModelError, match=told):
        predict(Width(), monkeypatch, score)


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


@pytest.mark.parametrize("kind", [ModelError, DataError])
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
