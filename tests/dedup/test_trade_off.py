"""The trade-off is that of estimators fitted by hand to what a comparison of all pairs keeps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from near_rows import digits, kept_of_all_pairs, word
from PIL import Image
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import SparkSession

from sparkdl import NearDuplicates

ROWS, HELD_OUT = 600, 200


@pytest.mark.gate
def test_each_threshold_is_measured_on_a_model_of_the_rows_that_it_keeps(
    spark: SparkSession,
) -> None:
    images, labels = digits(ROWS + HELD_OUT)
    words = [word(Image.fromarray(each), "dhash") for each in images]
    pixels = [each[::4, ::4].reshape(-1).astype(np.float64) for each in images]
    columns = {"row.id": range(len(words)), "image": words, "label": labels, "features": pixels}
    frame = spark.createDataFrame(pa.table(columns))
    frame = frame.withColumn("features", array_to_vector("features")).repartition(3).cache()
    rows, held_out = frame.where(f"`row.id` < {ROWS}"), frame.where(f"`row.id` >= {ROWS}")
    estimator = LogisticRegression(maxIter=5)

    found = NearDuplicates(hash="given", threshold=9, keep="row.id").fit(rows)
    curve = found.curve(estimator, held_out, [0, 4, 9])

    tables = [
        list(range(ROWS)),
        *(kept_of_all_pairs(words[:ROWS], labels[:ROWS], threshold) for threshold in (0, 4, 9)),
    ]
    assert curve.table["rows"].tolist() == [len(table) for table in tables]
    assert curve.table["share"].tolist() == [len(table) / ROWS for table in tables]
    assert curve.table["threshold"].isna().tolist() == [True, False, False, False]
    assert curve.table["threshold"][1:].tolist() == [0, 4, 9]
    assert (curve.table["seconds"] > 0).all()
    by_hand = []
    for table in tables:
        model = estimator.fit(rows.where(rows["`row.id`"].isin(table)))
        answers = model.transform(held_out).select("label", "prediction").toPandas()
        by_hand.append((answers["label"] == answers["prediction"]).mean())
    assert curve.metric == "accuracy"
    assert curve.table["accuracy"].tolist() == pytest.approx(by_hand, abs=2.5 / HELD_OUT)
    assert len(set(by_hand)) > 1  # else any table would do

    error = RegressionEvaluator(metricName="mae")
    other = found.curve(estimator, held_out, [4], evaluator=error)
    assert other.metric == "mae"
    assert other.table["rows"].tolist() == [len(tables[0]), len(tables[2])]
    axes = other.plot()
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([100, len(tables[2]) / ROWS * 100])
    found.unpersist()
    frame.unpersist()
