"""What the network is compared with: a constant, and pyspark.ml's logistic regression."""

from typing import Any

from pyspark.ml import Estimator, Pipeline, Transformer
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flights.features import CATEGORIES


class MajorityClass(Estimator["MajorityClassModel"]):
    """Predicts for every flight the share of late flights in the training part."""

    def _fit(self, dataset: DataFrame) -> "MajorityClassModel":
        """Called by ``fit``."""
        rate = dataset.agg(F.avg("label")).first()
        assert rate is not None  # an aggregate without keys has one row
        return MajorityClassModel(rate[0])


class MajorityClassModel(Transformer):
    """Adds ``probability``, the same vector of both classes to each row.

    Args:
        rate: the probability of the label 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Called by ``transform``."""
        constant = array_to_vector(F.array(F.lit(1.0 - self.rate), F.lit(self.rate)))
        return dataset.withColumn("probability", constant)


class NumericVector(Transformer):
    """Adds ``vector``, the array ``numeric`` as pyspark.ml's own stages read it."""

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Called by ``transform``."""
        return dataset.withColumn("vector", array_to_vector(F.col("numeric")))


def logistic_regression(maxIter: int = 30, regParam: float = 0.0001) -> Pipeline:
    """Logistic regression on the network's features, its categories one-hot.

    Args:
        maxIter: most iterations.
        regParam: weight of the L2 penalty.
    """
    encoded = [f"{category}_one_hot" for category in CATEGORIES]
    steps: list[Any] = [
        NumericVector(),
        OneHotEncoder(inputCols=list(CATEGORIES), outputCols=encoded, handleInvalid="keep"),
        VectorAssembler(inputCols=["vector", *encoded], outputCol="features"),
        LogisticRegression(maxIter=maxIter, regParam=regParam),
    ]
    return Pipeline(stages=steps)
