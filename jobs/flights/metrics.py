"""Metrics of two classes that pyspark.ml has only for predictions, from probabilities."""

from pyspark.ml.evaluation import Evaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

SMALLEST_PROBABILITY = 1e-15
"""A model that was certain and wrong gets a large loss, not an infinite one."""


class Accuracy(Evaluator):
    """Share of the rows that a threshold of one half predicts rightly.

    Reads ``label`` (0 or 1) and ``probability`` (vector of both classes).
    """

    def _evaluate(self, dataset: DataFrame) -> float:
        """Called by ``evaluate``."""
        return _mean(dataset, ((_late() > 0.5) == (F.col("label") == 1)).cast("double"))


class LogLoss(Evaluator):
    """Mean negative logarithm (natural) of the probability given to what happened.

    Reads ``label`` (0 or 1) and ``probability`` (vector of both classes).
    """

    def _evaluate(self, dataset: DataFrame) -> float:
        """Called by ``evaluate``."""
        happened = F.when(F.col("label") == 1, _late()).otherwise(1 - _late())
        return _mean(dataset, -F.ln(F.greatest(happened, F.lit(SMALLEST_PROBABILITY))))

    def isLargerBetter(self) -> bool:
        """A smaller one is."""
        return False


def _late() -> Column:
    return vector_to_array(F.col("probability"))[1]


def _mean(rows: DataFrame, column: Column) -> float:
    found = rows.agg(F.avg(column)).first()
    assert found is not None  # an aggregate without keys has one row
    return float(found[0])
