"""``transform`` adds what the module computes, in batches, and leaves everything else alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from frames import estimator, features_of, frame, frame_of_sizes, labels_of
from models import TwoTables
from pyspark import SparkContext
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from subprocesses import printed_by
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from sparkdl import TorchModel
from sparkdl.errors import DataError

IDS = range(60)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    return frame(spark)


@pytest.fixture(scope="module")
def classifier(rows: DataFrame) -> TorchModel:
    return estimator().fit(rows)


def outputs_of(model: TorchModel) -> Tensor:
    """The module's outputs for rows 0 to 59, by torch in this process."""
    with torch.no_grad():
        outputs: Tensor = model.module(torch.tensor(features_of(IDS), dtype=torch.float32))
    return outputs


def column_of(frame: DataFrame, name: str = "prediction") -> np.ndarray:
    found = [row[0] for row in frame.orderBy("id").select(name).collect()]
    return np.array([v.toArray() if hasattr(v, "toArray") else v for v in found])


def predict(model: TorchModel, rows: DataFrame, output_type: str) -> np.ndarray:
    return column_of(model.transform(rows, {model.outputType: output_type}))


def close(found: np.ndarray, expected: Tensor) -> bool:
    return found.shape == tuple(expected.shape) and np.allclose(found, expected, atol=1e-6)


@pytest.mark.versions
def test_each_output_type_of_logits_is_what_torch_says(
    classifier: TorchModel, rows: DataFrame
) -> None:
    outputs, predicted = outputs_of(classifier), classifier.transform(rows)
    assert predicted.schema["prediction"].dataType.simpleString() == "double"
    assert np.array_equal(column_of(predicted), outputs.argmax(dim=1).numpy())
    assert close(predict(classifier, rows, "raw"), outputs)
    assert close(predict(classifier, rows, "class"), outputs.argmax(dim=1).double())
    probable = classifier.copy(
        {classifier.outputType: "probability", classifier.predictionCol: "p"}
    )
    probabilities = probable.transform(rows)
    assert probabilities.schema["p"].dataType.simpleString() == "vector"
    assert probabilities.columns[-1] == "p"
    assert close(column_of(probabilities, "p"), outputs.softmax(dim=1))
    assert classifier.getPredictionCol() == "prediction"


@pytest.mark.versions
def test_rows_of_any_number_are_all_predicted_in_order(
    spark: SparkSession, classifier: TorchModel, rows: DataFrame
) -> None:
    """More than a batch holds, none at all, and none in some of the partitions."""
    found = predict(classifier, frame(spark, rows=2500, partitions=1), "raw")
    with torch.no_grad():
        expected = classifier.module(torch.tensor(features_of(range(2500)), dtype=torch.float32))
    assert close(found, expected)
    predicted = classifier.transform(rows.where("id < 0"))
    assert predicted.collect() == []
    assert predicted.columns[-1] == "prediction"
    found = predict(classifier, frame_of_sizes(spark, [0, 60, 0]), "raw")
    assert close(found, outputs_of(classifier))


def test_sparse_vectors_train_like_the_dense_arrays_they_stand_for(spark: SparkSession) -> None:
    ids = np.arange(30)
    dense = np.where(features_of(ids) > 0, features_of(ids), 0.0)
    sparse = [
        (Vectors.sparse(4, {k: float(v) for k, v in enumerate(x) if v}), int(y))
        for x, y in zip(dense, labels_of(ids), strict=True)
    ]
    torch.manual_seed(1)
    network = nn.Linear(4, 3)
    fit = estimator(model=network, numWorkers=1, batchSize=30, epochs=2)
    model = fit.fit(spark.createDataFrame(sparse, ["features", "label"]).coalesce(1))

    x, y = torch.tensor(dense, dtype=torch.float32), torch.tensor(labels_of(ids))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    assert torch.allclose(model.module.weight, network.weight, rtol=1e-5, atol=1e-7)


@pytest.mark.versions
def test_several_columns_reach_the_model_as_arguments_and_integers_as_int64(
    rows: DataFrame,
) -> None:
    given = rows.withColumn("carrier", (F.col("id") % 5).cast("short"))
    model = estimator(model=TwoTables(), featuresCols=["carrier", "features"]).fit(given)
    with torch.no_grad():
        expected = model.module(
            torch.tensor([i % 5 for i in IDS]), torch.tensor(features_of(IDS), dtype=torch.float32)
        )
    assert close(predict(model, given, "raw"), expected)


def test_a_column_that_is_missing_or_that_spark_takes_for_the_prediction_is_named(
    spark: SparkSession, classifier: TorchModel, rows: DataFrame
) -> None:
    """Unless it is told otherwise, to Spark two names are one if only their case differs."""
    for name in ("prediction", "Prediction"):
        named = rows.withColumn(name, F.lit("kept"))
        with pytest.raises(DataError, match=rf"already has a column '{name}'.*setPredictionCol"):
            classifier.transform(named)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert classifier.transform(named).columns[-2:] == ["Prediction", "prediction"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(DataError, match="'features', which the DataFrame does not have"):
        classifier.transform(rows.drop("features"))


@pytest.mark.parametrize(
    "way",
    [
        "transform",
        pytest.param("udf", marks=pytest.mark.gate),
        pytest.param("evaluate", marks=pytest.mark.gate),
    ],
)
def test_numbers_that_a_fit_would_refuse_are_refused_in_one_sentence(
    spark: SparkSession, way: str
) -> None:
    model = TorchModel.from_module(nn.Identity(), torch.zeros(1, 2, dtype=torch.uint8))
    given = spark.createDataFrame([([1, 300], 0.0)], "features array<int>, label float").coalesce(1)
    told = r"'features' holds 300 \(int32\) in row 0 .* uint8, the dtype of its tensor, cannot hold"
    if way == "evaluate":
        with pytest.raises(DataError, match=f"^column {told}"):
            model.evaluate(given, {"error": MeanSquaredError})
        return
    added = model.transform(given) if way == "transform" else given.select(model.udf()("features"))
    with pytest.raises(Exception, match=told) as caught:
        added.collect()
    assert str(caught.value).count('File "') <= 2


def test_a_change_to_the_module_reaches_the_next_prediction_and_no_earlier_one(
    classifier: TorchModel, rows: DataFrame
) -> None:
    model = classifier.copy().setOutputType("raw")
    model.module = copy.deepcopy(classifier.module)
    before = model.transform(rows)
    expected = outputs_of(model)
    with torch.no_grad():
        model.module[-1].bias.add_(torch.tensor([0.0, 50.0, 0.0]))
    assert close(column_of(model.transform(rows)), outputs_of(model))
    assert close(column_of(before), expected)
    model.module = classifier.module
    assert close(column_of(model.transform(rows)), expected)


def test_a_model_that_did_not_change_is_sent_to_the_executors_once(
    classifier: TorchModel, rows: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    broadcast = SparkContext.broadcast

    def count(self: SparkContext, value: bytes) -> Any:
        sent.append(value)
        return broadcast(self, value)

    monkeypatch.setattr(SparkContext, "broadcast", count)
    model = classifier.copy()
    model.module = copy.deepcopy(classifier.module)
    for output_type in ("raw", "class", "raw"):
        model.transform(rows, {model.outputType: output_type})
    model.copy().transform(rows)
    assert len(sent) == 1


OUTLIVES = """
import json
import torch
from pyspark.sql import SparkSession
from sparkdl import TorchModel
from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.protocols import ColumnSpec

features = [ColumnSpec("features", torch.float32, (2,))]
module = torch.nn.Linear(2, 1, bias=False)
with torch.no_grad():
    module.weight.copy_(torch.tensor([[1.0, 10.0]]))
model = TorchModel(SavedModule(module, None, features, "unknown", {None: 1}, ()))
found = {"transform": [], "udf": [], "of another session": []}
for session in range(2):
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    rows = spark.createDataFrame([([session + 1.0, 2.0],)], "features array<double>")
    found["transform"].append(model.transform(rows).first().prediction)
    if session == 0:
        uncalled, called = model.udf(), model.udf()
        found["udf"].append(rows.select(called("features")).first()[0])
    for udf in (uncalled, called) if session == 1 else ():
        for use in (lambda: udf("features"), lambda: spark.udf.register("predict", udf)):
            try:
                found["of another session"].append(["nothing", str(use())])
            except Exception as error:
                found["of another session"].append([type(error).__name__, str(error)])
    spark.stop()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def in_two_sessions() -> dict[str, Any]:
    """What a model predicted in a session, and after it in another one of the same process."""
    found: dict[str, Any] = json.loads(printed_by("-c", OUTLIVES).splitlines()[-1])
    return found


@pytest.mark.gate
def test_a_model_outlives_the_session_in_which_it_first_predicted(
    in_two_sessions: dict[str, Any],
) -> None:
    assert in_two_sessions["transform"] == [21.0, 22.0]


@pytest.mark.gate
def test_a_udf_of_a_session_that_was_stopped_says_that_another_one_has_to_be_made(
    in_two_sessions: dict[str, Any],
) -> None:
    assert in_two_sessions["udf"] == [21.0]
    told = in_two_sessions["of another session"]
    assert [kind for kind, _ in told] == ["ConfigError", "PicklingError"] * 2
    assert all("call model.udf() again, and register what it returns" in why for _, why in told)


def test_a_models_forward_runs_without_gradients_and_in_evaluation_mode(rows: DataFrame) -> None:
    class Reports(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return torch.full((len(features),), float(self.training or torch.is_grad_enabled()))

    model = TorchModel.from_module(Reports(), torch.zeros(1, 4))
    assert not predict(model, rows, "raw").any()


@pytest.mark.gate
def test_columns_may_have_any_name(rows: DataFrame) -> None:
    """Lazy layers take their shapes from a row of them."""
    given = rows.withColumnsRenamed({"features": "my.own `features`", "label": "the label"})
    names = {"featuresCol": "my.own `features`", "labelCol": "the label", "predictionCol": "a.b"}
    fitted = estimator(model=lambda: nn.LazyLinear(3), outputType="raw", **names).fit(given)
    found = fitted.transform(given).orderBy("id").select("`a.b`").collect()
    assert close(np.array([row[0].toArray() for row in found]), outputs_of(fitted))
