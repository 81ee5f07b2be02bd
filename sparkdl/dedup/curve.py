"""The trade-off of CE-Dedup: how accurate a model is that is trained on fewer and fewer rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.ml import Estimator
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError
from sparkdl.figures import pyplot


@dataclass(frozen=True)
class TradeOff:
    """What ``NearDuplicatesModel.curve`` returns.

    Attributes:
        table: a row for all rows, whose ``threshold`` is null, and one a threshold: ``threshold``,
            ``rows`` that were trained on, their ``share`` of all, the metric, and the ``seconds``
            of the fit.
        metric: the name of its column.
    """

    table: pd.DataFrame
    metric: str

    def plot(self) -> Any:
        """Draw the metric over the share of rows; returns matplotlib's axes.

        Raises:
            SetupError: matplotlib is not installed.
        """
        axes = pyplot().subplots()[1]
        axes.plot(100 * self.table["share"], self.table[self.metric], marker="o")
        for _, row in self.table.iterrows():
            label = "all" if pd.isna(row["threshold"]) else str(row["threshold"])
            where = (100 * row["share"], row[self.metric])
            axes.annotate(label, where, textcoords="offset points", xytext=(4, 4))
        axes.set_xlabel("rows kept (%), by threshold")
        axes.set_ylabel(self.metric)
        return axes

    def __repr__(self) -> str:
        return str(self.table.to_string(index=False))

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False))


def evaluator_for(estimator: Estimator[Any], evaluator: Evaluator | None) -> Evaluator:
    """The evaluator that was given, or accuracy on the estimator's columns.

    Raises:
        ConfigError: none was given, and the estimator does not say which columns.
    """
    if evaluator is not None:
        return evaluator
    known = [estimator.hasParam(name) for name in ("labelCol", "predictionCol")]
    if not all(known):
        raise ConfigError(
            f"{type(estimator).__name__} has no labelCol and predictionCol; say how to measure "
            "its model: evaluator=MulticlassClassificationEvaluator(metricName='accuracy', ...)"
        )
    label, prediction = (estimator.getOrDefault(n) for n in ("labelCol", "predictionCol"))
    return MulticlassClassificationEvaluator(
        labelCol=label, predictionCol=prediction, metricName="accuracy"
    )


def measured(
    estimator: Estimator[Any],
    evaluator: Evaluator,
    held_out: DataFrame,
    tables: Sequence[tuple[int | None, int, DataFrame]],
) -> TradeOff:
    """Train on each table.

    Args:
        estimator: what is trained.
        evaluator: measures its models.
        held_out: on these rows.
        tables: threshold, rows and the rows themselves; the first has all.
    """
    metric = evaluator.getOrDefault("metricName") if evaluator.hasParam("metricName") else "metric"
    lines = []
    for threshold, rows, table in tables:
        start = time.perf_counter()
        model = estimator.fit(table)
        seconds = time.perf_counter() - start
        value = evaluator.evaluate(model.transform(held_out))
        lines.append((threshold, rows, rows / tables[0][1], value, seconds))
    result = pd.DataFrame(lines, columns=["threshold", "rows", "share", metric, "seconds"])
    return TradeOff(result.astype({"threshold": "Int64"}), metric)
