"""Columns of classes."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from models import Net
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import Tensor, nn

from sparkdl import TorchClassifier, TorchRegressor
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.head import Head
from sparkdl.estimator.labels import indexed, labels_of, require_known, with_names
from sparkdl.outputs import Widths

CLASSES = 3


def classifier(**changes: Any) -> TorchClassifier:
    return TorchClassifier(model=Net, optimizer=partial(torch.optim.SGD, lr=0.1), **changes)


def columns(head: Head, outputs: Tensor, **changes: Any) -> dict[str, np.ndarray]:
    width = outputs.shape[1] if outputs.dim() == 2 else None
    made = classifier(**changes).predicted_columns(head, {None: width})
    return {each.name: each.function(outputs).numpy() for each in made}


def test_scores_become_a_column_each_with_probabilities_and_classes() -> None:
    scores = torch.randn(5, CLASSES, dtype=torch.float64)
    found = columns(Head.LOGITS, scores)
    np.testing.assert_array_equal(found["rawPrediction"], scores)
    np.testing.assert_allclose(found["probability"], scores.softmax(1))
    np.testing.assert_array_equal(found["prediction"], scores.argmax(1))


def test_one_score_is_one_for_and_one_against() -> None:
    scores = torch.tensor([[-2.0], [0.0], [3.0]])
    for outputs in (scores, scores[:, 0]):
        found = columns(Head.BINARY_LOGIT, outputs)
        assert found["rawPrediction"].tolist() == [[2.0, -2.0], [0.0, 0.0], [-3.0, 3.0]]
        np.testing.assert_allclose(found["probability"][:, 1], scores[:, 0].sigmoid())
        assert found["prediction"].tolist() == [0.0, 0.0, 1.0]


def test_two_scores_rank_rows_by_that_of_class_one_as_their_probabilities_do() -> None:
    scores = torch.tensor([[9.0, 8.0], [-4.0, -2.0], [0.0, 0.5], [5.0, 5.0]])
    for head in (Head.LOGITS, Head.SCORES):
        raw = columns(head, scores)["rawPrediction"]
        np.testing.assert_array_equal(raw[:, 1].argsort(), scores.softmax(1)[:, 1].argsort())
        np.testing.assert_allclose(torch.tensor(raw).softmax(1), scores.softmax(1), rtol=1e-6)


def test_a_loss_without_probabilities_or_an_empty_name_leaves_a_column_out() -> None:
    found = columns(Head.SCORES, torch.tensor([[1.0, 2.0, 0.0]]))
    assert found.keys() == {"rawPrediction", "prediction"}
    assert found["prediction"].tolist() == [1.0]
    found = columns(Head.LOGITS, torch.eye(CLASSES), rawPredictionCol="", probabilityCol="")
    assert found.keys() == {"prediction"}


@given(
    st.lists(st.floats(0, 1), min_size=CLASSES, max_size=CLASSES).filter(lambda p: sum(p) > 0.1),
    st.lists(st.floats(0.01, 5), min_size=CLASSES, max_size=CLASSES),
)
def test_the_largest_probability_over_its_threshold_wins(
    shares: list[float], thresholds: list[float]
) -> None:
    probabilities = np.array([shares]) / sum(shares)
    found = columns(
        Head.LOG_PROBABILITIES, torch.tensor(probabilities).log(), thresholds=thresholds
    )
    scaled = (probabilities / thresholds)[0]
    winner = int(found["prediction"][0])
    assert scaled[winner] >= scaled.max() * (1 - 1e-12)


def test_a_threshold_of_zero_wins_whenever_its_class_is_possible() -> None:
    outputs = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.3, 0.0], [0.8, 0.0, 0.2]]).log()
    found = columns(Head.LOG_PROBABILITIES, outputs, thresholds=[0.5, 0.0, 0.1])
    assert found["prediction"].tolist() == [1.0, 1.0, 2.0]


def test_labels_that_are_numbers_are_predicted_themselves() -> None:
    outputs = torch.eye(CLASSES)
    found = columns(Head.LOGITS, outputs, labels=[10, 2.5, -1])
    assert found["prediction"].tolist() == [10.0, 2.5, -1.0]
    assert columns(Head.LOGITS, outputs, labels=["a", "b", "c"])["prediction"].tolist() == [0, 1, 2]
    both = columns(Head.LOGITS, torch.eye(2), labels=[True, False])
    assert both["prediction"].tolist() == [1.0, 0.0]


@every_row(
    (Head.UNKNOWN, {None: 3}, {}, "needs one of torch's losses for classes"),
    (Head.LOGITS, {"a": 3, "b": 2}, {}, "there are outputs 'a', 'b'"),
    (Head.LOGITS, {None: 1}, {}, "one output per class, but the model gives 1 per row"),
    (Head.BINARY_LOGIT, {None: 3}, {}, "one output per row, for two classes, but the model g"),
    (Head.LOGITS, {None: 3}, {"labels": ["a", "b"]}, "3 classes, but there are 2 labels"),
    (Head.LOGITS, {None: 3}, {"thresholds": [1.0, 1.0]}, "thresholds must be 3 numbers > 0"),
    (Head.LOGITS, {None: 3}, {"thresholds": [0.0, 0.0, 1.0]}, "at most one may be 0"),
    (Head.LOGITS, {None: 3}, {"thresholds": [-1.0, 1.0, 1.0]}, "thresholds must be 3"),
    (Head.SCORES, {None: 3}, {"thresholds": [1.0, 1.0, 1.0]}, "MultiMarginLoss does not give"),
    (Head.LOGITS, {None: 3}, {"probabilityCol": "prediction"}, "must be different names"),
)
def test_what_is_no_classifier_is_refused(
    head: Head, widths: Widths, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        classifier(**changes).predicted_columns(head, widths)


@every_row(
    *([], ["a"], ["a", "a"], ["a", 1], "ab", 3, [True, 0], [True, True], [1, None]),
    [date(2024, 1, 1), 5],
    [2**53, 2**53 + 1],  # one and the same double
    [Decimal("0.1"), 0.1],
)
def test_what_are_no_labels_is_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="labels must be two or more different strings, or numbers"
    ):
        classifier(labels=value)


@every("huge", [2**53, -(2**53) - 1, np.int64(2**60 + 1), Decimal(2**53 + 1)])
def test_whole_numbers_that_float64_takes_for_others_are_no_labels(huge: Any) -> None:
    with pytest.raises(ConfigError, match=f"labels hold {huge}, but .* Use texts"):
        classifier(labels=[5, huge])
    assert classifier(labels=[5, 2**53 - 1, 1e300]).getLabels() == [5, 2**53 - 1, 1e300]


def test_labels_of_other_types_become_what_a_saved_model_can_hold() -> None:
    assert classifier(labels=[True, False]).getLabels() == [True, False]
    assert classifier(labels=[Decimal("1.10"), Decimal(2)]).getLabels() == [1.1, 2.0]
    days = [date(2024, 12, 31), date(999, 1, 1)]
    assert classifier(labels=days).getLabels() == ["2024-12-31", "0999-01-01"]
    with pytest.raises(ConfigError, match="depends on the session's time zone"):
        classifier(labels=[datetime(2024, 1, 1), datetime(2025, 1, 1)])


def test_a_regressor_predicts_one_number() -> None:
    regressor = TorchRegressor(model=Net, optimizer=torch.optim.SGD)
    (column,) = regressor.predicted_columns(Head.UNKNOWN, {None: 1})
    assert (column.name, column.wide) == ("prediction", False)
    assert column.function(torch.tensor([[1.5], [2.0]])).tolist() == [1.5, 2.0]
    with pytest.raises(ConfigError, match="use TorchClassifier"):
        regressor.predicted_columns(Head.LOGITS, {None: 3})
    for widths, words in (({None: 4}, "this one gives 4"), ({"a": 1, "b": 1}, "several outputs")):
        with pytest.raises(ConfigError, match=words):
            regressor.predicted_columns(Head.UNKNOWN, widths)  # type: ignore[arg-type]


def test_arguments_are_those_of_torch_estimator_but_for_the_output_columns() -> None:
    assert classifier(epochs=3, batchSize=7, labelCol="y").getEpochs() == 3
    assert isinstance(classifier().getLoss(), nn.CrossEntropyLoss)
    with pytest.raises(ConfigError, match=r"TorchClassifier has no parameter 'outputType'"):
        classifier(outputType="class")
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        TorchRegressor(model=Net, optimizer=torch.optim.SGD, epoch=3)
    with pytest.raises(TypeError, match="TorchClassifier needs 'optimizer'"):
        TorchClassifier(model=Net)


@every_row(
    ("cast(0.1 as float)", [0.1, 0.2], "0.10000000149011612", "0.10000000149011612"),
    ("'%s \\' `x`'", ["a", "b"], '"%s \' `x`"', "%s ' `x`"),
    ("cast(null as string)", ["a", "b"], "null", "null"),
    ("double('nan')", [1, 2], "nan", "NaN"),
)
def test_a_label_that_is_not_among_the_labels_is_named(
    spark: SparkSession, sql: str, labels: list[Any], shown: str, in_spark: str
) -> None:
    column = "the.label"
    rows = spark.range(0, 3, 1, 1).selectExpr(f"{sql} as `{column}`", "id")
    told = f", which is not among labels={labels!r}"
    with_indices, index = indexed(rows, column, labels)
    with pytest.raises(DataError) as raised:
        require_known(with_indices, index, column, labels, ValueError("the cause"))
    assert f"label column '{column}' holds {shown}{told}. 3 rows" in str(raised.value)
    assert str(raised.value.__cause__) == "the cause"
    strictly, index = indexed(rows, column, labels, strict=True)
    with pytest.raises(PySparkException) as by_spark:
        strictly.select(f"`{index}`").collect()
    assert f"label column '{column}' holds {in_spark}{told}" in str(by_spark.value)


KNOWN: dict[str, tuple[list[Any], list[Any]]] = {
    "a.text": (["b", "a"], ["a", "b"]),
    "day": ([date(2024, 2, 29), date(1999, 12, 31)], ["1999-12-31", "2024-02-29"]),
    "decimal": ([Decimal("10.50"), Decimal("0.10")], [0.1, 10.5]),
    "number": ([30.0, 10.5], [10.5, 30.0]),
    "flag": ([True, False], [False, True]),
}


def test_labels_that_are_known_have_their_index(spark: SparkSession) -> None:
    values = zip(*(values for values, _ in KNOWN.values()), strict=True)
    rows = spark.createDataFrame([*values], [*KNOWN]).coalesce(1)
    for strict in (False, True):
        found, indices = rows, list[str]()
        for name, (_, labels) in KNOWN.items():
            found, index = indexed(found, name, labels, strict=strict)
            indices.append(index)
        chosen = found.select(*(f"`{index}`" for index in indices)).collect()
        assert [set(row) for row in chosen] == [{1.0}, {0.0}]
    require_known(found, indices[0], "a.text", KNOWN["a.text"][1], ValueError())
    for name in ("a.text", "day", "flag"):
        labels = KNOWN[name][1]
        assert labels_of(rows, name) == (None if name == "flag" else labels)


def test_spark_writes_all_numbers_among_the_labels_in_one_column(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark takes time by the square of the columns."""
    selected: list[int] = []
    frame = type(spark.range(1))  # of a classic session or of Spark Connect
    select = frame.select

    def counted(frame: DataFrame, *columns: Any) -> DataFrame:
        selected.append(len(columns))
        return select(frame, *columns)

    monkeypatch.setattr(frame, "select", counted)
    labels = [1e300, -0.5, *range(40)]
    found, index = indexed(spark.createDataFrame([(39,), (0,)], "y int"), "y", labels)
    assert max(selected) == 1
    assert [row[index] for row in found.orderBy("y").collect()] == [2.0, 41.0]


def test_texts_of_which_several_are_one_to_spark_are_no_labels() -> None:
    frame: Any = SimpleNamespace(
        schema=T.StructType([T.StructField("y", T.StringType("UTF8_LCASE"))])
    )
    with pytest.raises(DataError, match=r"'y' has the collation UTF8_LCASE.*CAST\(lower\(`y`\)"):
        labels_of(frame, "y")


@every("name", ["a.b", "a`b", "*", "a b"])
def test_indices_get_their_names_whatever_the_column_is_called(
    spark: SparkSession, name: str
) -> None:
    quoted = name.replace("`", "``")
    rows = spark.sql(f"SELECT 1.0D AS `{quoted}`, 'x' AS other")
    named = rows.select("other", with_names(F.col(f"`{quoted}`"), name, ["no", "yes"]))
    assert named.columns == ["other", name]
    assert named.schema[name].metadata["ml_attr"]["vals"] == ["no", "yes"]
    assert tuple(named.collect()[0]) == ("x", 1.0)


def test_indices_that_another_string_indexer_gave_to_the_same_texts_are_refused(
    spark: SparkSession,
) -> None:
    numbers = spark.createDataFrame([(0.0,), (1.0,)], "y double")
    rows = numbers.select(with_names(F.col("y"), "y", ["no", "yes"]))
    for same in (["no", "yes"], ["no", "yes", "__unknown"], ["cat", "dog"]):
        assert indexed(rows, "y", [*same])[1] == "y"
    told = r"'y' holds 0 for 'no', .*class 1 of labels=\['yes', 'no'\].*StringIndexerModel"
    with pytest.raises(DataError, match=told):
        indexed(rows, "y", ["yes", "no"])
