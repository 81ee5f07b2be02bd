"""A module that was trained elsewhere predicts on a DataFrame, as it does in this process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every_row
from pyspark.errors import PythonException
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, ModelError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, ROWS = 6, 40
FEATURES = np.random.default_rng(3).standard_normal((ROWS, WIDTH)).astype(np.float32)


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Dropout(), nn.Linear(5, 3))


def computed(module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = module.eval().to(dtype)(torch.from_numpy(FEATURES).to(dtype))
    return outputs


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    records = [
        (index, FEATURES[index].tolist(), Vectors.dense(FEATURES[index])) for index in range(ROWS)
    ]
    return spark.createDataFrame(records, ["id", "features", "vector"]).repartition(3).cache()


def values(frame: DataFrame, column: str = "prediction") -> np.ndarray:
    chosen = F.col(column)
    if frame.select(column).schema[0].dataType.simpleString() == "vector":
        chosen = vector_to_array(column)
    return np.array([row[0] for row in frame.orderBy("id").select(chosen).collect()])


def test_a_module_predicts_what_it_predicts_here_and_is_left_as_it_was(rows: DataFrame) -> None:
    module = classifier()
    model = TorchModel.from_module(module, torch.zeros(1, WIDTH), loss=nn.CrossEntropyLoss())
    assert module.training
    expected = computed(module)
    assert np.array_equal(values(model.transform(rows)), expected.argmax(dim=1).numpy())
    # Vectors are as good as arrays, whatever the example was.
    vectors = model.copy({model.featuresCol: "vector", model.outputType: "raw"})
    assert np.allclose(values(vectors.transform(rows)), expected, atol=1e-6)


def test_columns_that_are_called_otherwise_than_in_training_are_named_as_here(
    rows: DataFrame,
) -> None:
    module, example = classifier(), torch.zeros(1, WIDTH)
    model = TorchModel.from_module(module, example, featuresCol="x").setFeaturesCol("features")
    found = np.stack(values(model.transform(rows)))
    np.testing.assert_allclose(found, computed(module), rtol=1e-6, atol=1e-6)
    null = rows.select(F.lit(None).cast("array<float>").alias("features"))
    with pytest.raises(PythonException, match=r"column 'features' has .*`features` IS NOT NULL"):
        model.transform(null).collect()


def test_it_is_saved_and_loaded_as_any_other(rows: DataFrame, tmp_path: Path) -> None:
    model = TorchModel.from_module(
        classifier(), torch.zeros(1, WIDTH), predictionCol="scores", predictionDtype="float32"
    )
    model.save(str(tmp_path / "model"))
    again = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert again.getPredictionDtype() == "float32"
    assert again.history == []
    predicted = again.transform(rows)
    assert predicted.schema["scores"].dataType.simpleString() == "array<float>"
    assert np.allclose(values(predicted, "scores"), computed(classifier()), atol=1e-6)


def test_half_precision_rounds_as_the_module_in_half_precision_does(rows: DataFrame) -> None:
    dtype = torch.bfloat16
    model = TorchModel.from_module(
        classifier(), torch.zeros(1, WIDTH), predictPrecision="bfloat16", predictBatchSize=7
    )
    found = values(model.transform(rows))
    assert np.allclose(found, computed(classifier(), dtype).double(), rtol=1e-2, atol=1e-2)
    # What half precision cannot tell apart is not told apart: the option has an effect.
    assert np.array_equal(found, torch.from_numpy(found).to(dtype).double())


class Telling(nn.Module):
    """Says beside its outputs whether they come of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.network = classifier()

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.network(features)
        told = torch.full((len(features), 1), float(torch.compiler.is_compiling()))
        return torch.cat([outputs, told], dim=1)


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_code_predicts_the_same_for_batches_of_any_size(
    rows: DataFrame, compiled: bool
) -> None:
    model = TorchModel.from_module(
        Telling(), torch.zeros(1, WIDTH), predictCompiled=compiled, predictBatchSize=7
    )
    found = values(model.transform(rows))
    assert np.allclose(found[:, :-1], computed(classifier()), rtol=1e-5, atol=1e-6)
    assert np.array_equal(found[:, -1], np.full(ROWS, float(compiled)))


@pytest.mark.versions
def test_the_function_takes_vectors_and_goes_with_the_module_as_it_is_when_made(
    rows: DataFrame,
) -> None:
    module = nn.Linear(WIDTH, 1)
    model = TorchModel.from_module(module, torch.zeros(1, WIDTH))
    with ThreadPoolExecutor(1) as pool:  # where no session is active
        before = pool.submit(model.udf).result(60)
    with torch.no_grad():
        old = module(torch.from_numpy(FEATURES))[:, 0]
        module.weight.zero_()
        module.bias.fill_(2.0)
    predicted = rows.select(
        "id", before("vector").alias("old"), model.udf()("features").alias("new")
    )
    assert predicted.schema["old"].dataType.simpleString() == "double"
    assert np.allclose(values(predicted, "old"), old, atol=1e-6)
    assert set(values(predicted, "new")) == {2.0}


@pytest.mark.versions
def test_the_function_takes_sparse_vectors_beside_dense_ones_and_skips_rows_without_one(
    spark: SparkSession,
) -> None:
    vectors = [Vectors.dense([1, 2]), Vectors.sparse(2, {1: 3}), None, Vectors.sparse(2, {})]
    rows = spark.createDataFrame(list(enumerate(vectors)), ["id", "x"])
    module = nn.Linear(2, 1).double()
    module.load_state_dict({"weight": torch.tensor([[1.0, 10.0]]), "bias": torch.tensor([0.5])})
    example = torch.zeros(1, 2, dtype=torch.float64)
    predict = TorchModel.from_module(module, example, handleInvalid="skip").udf()
    found = rows.coalesce(1).select("id", predict("x").alias("prediction"))
    assert values(found).tolist() == [21.5, 30.5, None, 0.5]


@pytest.mark.nightly
def test_a_function_called_with_columns_that_the_model_does_not_take_says_so(
    rows: DataFrame,
) -> None:
    model = TorchModel.from_module(nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH))
    with pytest.raises(Exception, match="called with 2 columns, but it takes 1: features"):
        rows.select(model.udf()("features", "id")).collect()


@pytest.mark.nightly
def test_an_exported_program_predicts_and_is_saved_as_the_module_it_was_made_of(
    rows: DataFrame, tmp_path: Path
) -> None:
    module = classifier().eval()
    shapes = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(module, (torch.zeros(2, WIDTH),), dynamic_shapes=shapes)
    with pytest.raises(ModelError, match=r"give the program itself, not its module\(\)"):
        TorchModel.from_module(program.module(), torch.zeros(1, WIDTH))
    model = TorchModel.from_module(program, torch.zeros(1, WIDTH))
    expected = computed(module)
    assert np.allclose(values(model.transform(rows)), expected, atol=1e-6)
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert np.allclose(values(loaded.transform(rows)), expected, atol=1e-6)


@every_row(
    (torch.zeros(WIDTH + 1, WIDTH + 1), {}, r"fails on the example .*float32 \(5, 7\)"),
    (torch.zeros(()), {}, r"each tensor of shape \(rows, ...\); this one is 'features'"),
    (torch.zeros(0, WIDTH), {}, r"each tensor of shape \(rows, ...\)"),
    ([], {}, "0 tensors for 1 feature column"),
    ([torch.zeros(1, WIDTH)] * 2, {}, "2 tensors for 1 feature column: features"),
    ({"x": torch.zeros(1, WIDTH)}, {}, "featuresAs='dict' or featuresAs='kwargs'"),
    (torch.zeros(1, WIDTH), {"feturesCol": "x"}, "no parameter 'feturesCol'"),
    (torch.zeros(1, WIDTH), {"imageCols": ["photo"]}, "imageCols names 'photo'"),
    (torch.zeros(1, WIDTH), {"outputType": "probability"}, "needs a loss that defines"),
    (torch.zeros(1, WIDTH), {"outputCols": {"a": "b"}}, "has only one output"),
    (torch.zeros(1, WIDTH), {"predictDevice": "tpu"}, "predictDevice must be auto"),
    (torch.zeros(1, WIDTH), {"predictBatchSize": 0}, "predictBatchSize"),
)
def test_what_cannot_be_a_model_is_refused_before_any_job(
    spark: SparkSession, example: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        TorchModel.from_module(classifier(), example, **params)


class Complex(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given.to(self.weight.dtype)).imag


def test_half_precision_of_complex_parameters_is_refused(rows: DataFrame) -> None:
    module = Complex(WIDTH, 2, dtype=torch.complex64)
    model = TorchModel.from_module(module, torch.zeros(1, WIDTH), predictPrecision="bfloat16")
    with pytest.raises(ConfigError, match=r"'weight' is complex\. Set predictPrecision='own'"):
        model.transform(rows)


def test_a_module_on_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"on meta, .* give module.cpu\(\)"):
        TorchModel.from_module(nn.Linear(2, 1, device="meta"), torch.zeros(1, 2))


@pytest.mark.filterwarnings("ignore")  # torch says that some are prototypes
def test_outputs_of_every_form_that_is_no_column_are_refused_by_its_name() -> None:
    forms = {
        "nothing with one or more values per row": lambda each: each.sum(),
        r"sparse_coo .* Return output\.to_dense\(\)": lambda each: each.to_sparse(),
        "sparse_csr": lambda each: each.to_sparse_csr(),
        "jagged|nested": lambda each: torch.nested.as_nested_tensor(
            [each[0], each[0]], layout=torch.jagged
        ),
        "nested": lambda each: torch.nested.nested_tensor([each[0], each[0, :1]]),
        "quantized": lambda each: torch.quantize_per_tensor(each, 0.1, 0, torch.qint8),
        "meta": lambda each: each.to("meta"),
        "masked": lambda each: torch.masked.masked_tensor(each, each > 0),
    }
    for words, form in forms.items():
        with pytest.raises(ModelError, match=words):
            TorchModel.from_module(Formed(form), torch.ones(2, 2))


class Formed(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, features: Tensor) -> Any:
        return self.form(features)


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def test_an_error_without_a_text_is_told_by_its_class() -> None:
    def fail(_features: Tensor) -> Any:
        raise Untellable

    with pytest.raises(ModelError, match=r"Untellable: <exception str\(\) failed>"):
        TorchModel.from_module(Formed(fail), torch.ones(2, 2))


@pytest.mark.gate
def test_a_module_is_taken_within_inference_mode_too(rows: DataFrame) -> None:
    with torch.inference_mode():
        model = TorchModel.from_module(classifier(), torch.zeros(1, WIDTH))
    assert np.allclose(values(model.transform(rows)), computed(classifier()), atol=1e-6)


@pytest.mark.nightly
def test_a_stream_of_files_is_predicted_once_also_by_a_query_that_is_started_again(
    rows: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    module = classifier()
    model = TorchModel.from_module(module, torch.zeros(1, WIDTH))
    halves = rows.where("id < 20"), rows.where("id >= 20")
    source = str(tmp_path / "source")
    for half in halves:
        half.select("id", "features", "vector").write.mode("append").parquet(source)
        stream = spark.readStream.schema(half.select("id", "features", "vector").schema)
        query = (
            model.transform(stream.parquet(source))
            .select("id", "prediction")
            .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "predicted"), "parquet")
        )
        assert query.awaitTermination(120)
    predicted = spark.read.parquet(str(tmp_path / "predicted"))
    assert predicted.count() == ROWS
    assert np.allclose(values(predicted), computed(module), atol=1e-6)


class _Sum(nn.Module):
    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        return torch.stack(columns).sum(0)


def test_the_schema_is_read_as_often_for_many_columns_as_for_few(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of Spark Connect makes it anew each time."""
    kind = type(spark.range(1))
    schema, read = kind.__dict__["schema"], []

    def counted(frame: DataFrame) -> Any:
        read.append(frame)
        return schema.__get__(frame, kind)

    monkeypatch.setattr(kind, "schema", property(counted))
    counts = []
    for width in (3, 30):
        names = [f"x{index}" for index in range(width)]
        rows = spark.range(1).selectExpr(*(f"float(1) AS {name}" for name in names))
        model = TorchModel.from_module(_Sum(), [torch.zeros(2)] * width, featuresCols=names)
        read.clear()
        model.transform(rows)
        counts.append(len(read))
    assert counts[0] == counts[1]
