"""What the network is compared with: a constant, and pyspark.ml's logistic regression."""

from typing import Any

from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flights.features import CATEGORIES


def majority_class(train: DataFrame, test: DataFrame) -> DataFrame:
    """Predict for every flight the share of late flights in the training part.

    Args:
        train: prepared flights.
        test: prepared flights.

    Returns:
        ``label`` and ``probability`` (vector of both classes) of the test flights.
    """
    rate = train.agg(F.avg("label")).first()
    assert rate is not None  # an aggregate without keys has one row
    constant = array_to_vector(F.array(F.lit(1.0 - rate[0]), F.lit(rate[0])))
    return test.select("label", constant.alias("probability"))


def logistic_regression(
    train: DataFrame, test: DataFrame, regression: LogisticRegression
) -> DataFrame:
    """Fit logistic regression on the network's features, its categories one-hot.

    Args:
        train: prepared flights.
        test: prepared flights.
        regression: how to fit it; reads ``features`` and ``label``.

    Returns:
        ``label`` and ``probability`` (vector of both classes) of the test flights.
    """
    encoded = [f"{category}_one_hot" for category in CATEGORIES]
    steps: list[Any] = [
        OneHotEncoder(inputCols=list(CATEGORIES), outputCols=encoded, handleInvalid="keep"),
        VectorAssembler(inputCols=["vector", *encoded], outputCol="features"),
        regression,
    ]
    model = Pipeline(stages=steps).fit(_with_vector(train))
    return model.transform(_with_vector(test)).select("label", "probability")


def _with_vector(flights: DataFrame) -> DataFrame:
    return flights.withColumn("vector", array_to_vector(F.col("numeric")))
