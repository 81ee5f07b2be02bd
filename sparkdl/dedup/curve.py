"""The trade-off of CE-Dedup: how accurate a model is that is trained on fewer and fewer rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.ml import Estimator
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from pyspark.ml.param import Params
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from sparkdl.errors import ConfigError, DataError
from sparkdl.figures import pyplot
from sparkdl.spark.session.required import require_frame


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


def require_held_out(
    held_out: DataFrame, dataset: DataFrame, estimator: Estimator[Any], evaluator: Evaluator
) -> None:
    """Check that models can be measured on rows, before one is trained.

    Args:
        held_out: the rows.
        dataset: those that are trained on.
        estimator: which trains.
        evaluator: which measures.

    Raises:
        ConfigError: they are no DataFrame.
        DataError: they lack a column of the others that is needed, or it has another type.
    """
    require_frame(held_out, "held_out", to_end="Measure on")
    known, given = (
        {field.name.lower(): field.dataType for field in each.schema}
        for each in (dataset, held_out)
    )
    needed = [
        *_columns(estimator, ("features", "input")),
        *_columns(evaluator, ("features", "label", "weight")),
    ]
    for name in needed:
        trained = known.get(name.lower())
        if trained is None:
            continue
        measured_on = given.get(name.lower())
        if measured_on is None:
            raise DataError(
                f"held_out has no column '{name}', which the estimator's model or the evaluator "
                f"needs. It has: {', '.join(held_out.columns)}"
            )
        if _kind(measured_on) != _kind(trained):
            raise DataError(
                f"column '{name}' has type {measured_on.simpleString()} in held_out, but "
                f"{trained.simpleString()} in the rows that are trained on. Give both the same"
            )


def _kind(column: T.DataType) -> str:
    """What a column holds; numbers of any width are one kind, as Spark converts them."""
    if isinstance(column, T.ArrayType):
        return f"array<{_kind(column.elementType)}>"
    return "number" if isinstance(column, T.NumericType) else column.simpleString()


def _columns(of: Params, kinds: Sequence[str]) -> Iterator[str]:
    """The columns that Params name, and those of the stages that are among their values."""
    values = {param.name: value for param, value in of.extractParamMap().items()}
    for kind in kinds:
        found = values.get(f"{kind}Cols") or values.get(f"{kind}Col") or []
        yield from [found] if isinstance(found, str) else found
    for value in values.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Params):
                yield from _columns(part, kinds)


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
