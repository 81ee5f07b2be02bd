"""``TorchClassifier``: a PyTorch model in place of one of pyspark.ml's classifiers.

``TorchRegressor``: a PyTorch model in place of one of pyspark.ml's regressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.estimator import BaseEstimator, TorchEstimator
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.labels import (
    indexed,
    labels_of,
    require_known,
    require_outputs_of,
    with_names,
)
from sparkdl.estimator.outputs import ClassOutputs, NumberOutput
from sparkdl.estimator.params.declaration import constructor
from sparkdl.estimator.params.estimators import TorchClassifierParams, TorchRegressorParams
from sparkdl.events import MetricValue
from sparkdl.spark.required import require_frame


class TorchClassificationModel(FittedModel, ClassOutputs):
    """A trained classifier; adds ``rawPrediction``, ``probability`` and ``prediction``.

    Made by ``TorchClassifier.fit`` or ``TorchClassificationModel.load``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode.
        history: one ``EpochSummary`` per epoch of training.
    """

    @property
    def numClasses(self) -> int:
        """How many classes the model tells apart."""
        return self._count(self._head, self._made_of.widths[None])

    def _added(self, name: str, values: Column) -> Column:
        """A column of predictions; the classes' indices bring their labels."""
        labels = self.getLabels() if name == self.getPredictionCol() else None
        return with_names(values, name, labels)

    def _label_rows(self, dataset: DataFrame) -> tuple[DataFrame, list[str]]:
        """The rows with the index of each label; see ``FittedModel``."""
        rows, column = indexed(dataset, self.getLabelCol(), self.getLabels(), strict=True)
        return rows, [column]

    def evaluate(
        self, dataset: DataFrame, metrics: Mapping[str, Any], weightCol: str | None = None
    ) -> dict[str, MetricValue]:
        """Measure the model on labelled rows; see ``FittedModel``."""
        try:
            return super().evaluate(dataset, metrics, weightCol)
        except PySparkException as error:
            column, labels = self.getLabelCol(), self.getLabels()
            require_known(*indexed(dataset, column, labels), column, labels, error)
            raise


@constructor(TorchEstimator)
class TorchClassifier(TorchClassifierParams, BaseEstimator[TorchClassificationModel], ClassOutputs):
    """Trains a PyTorch model to tell classes apart, like pyspark.ml's classifiers.

    The fitted model adds the columns that theirs add, so it works with evaluators, ``OneVsRest``,
    ``CrossValidator`` and pipelines. The loss decides what its outputs are: a score for each class
    (``CrossEntropyLoss``, the default, ``NLLLoss``, ``MultiMarginLoss``), or one for two classes
    (``BCEWithLogitsLoss``, ``BCELoss``).

    ``labelCol`` holds the classes' indices 0, 1, ..., perhaps made by StringIndexer, whose labels
    are then kept; or booleans; or texts or dates, which are sorted; or, with ``labels``, any of
    these or any numbers.

    It has the arguments of ``TorchEstimator`` except ``outputCols`` and ``outputType``; ``model``
    and ``optimizer`` are required. These are its own, or have another default:

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    _model = TorchClassificationModel

    def _fit(
        self, dataset: DataFrame, warm_start: FittedModel | None = None
    ) -> TorchClassificationModel:
        """Called by ``fit``; see the class."""
        if self.getLabelCols() is not None:
            raise ConfigError(
                "a classifier has one label column, but labelCols names "
                f"{', '.join(self.getLabelCols() or [])}. Set labelCol, or use TorchEstimator"
            )
        require_frame(dataset, to_end="Fit", connect=True)
        column = self.getLabelCol()
        labels = self.getLabels() or labels_of(dataset, column)
        if isinstance(warm_start, TorchClassificationModel):
            require_outputs_of(column, labels, warm_start.getLabels())
        rows, index = indexed(dataset, column, labels)
        named = self.copy({self.labels: labels})
        try:
            return named._trained(named.copy({self.labelCol: index}), rows, warm_start)
        except DataError as error:
            require_known(rows, index, column, labels, error)
            raise


class TorchRegressionModel(FittedModel, NumberOutput):
    """A trained regressor; adds ``prediction``, a double.

    Made by ``TorchRegressor.fit`` or ``TorchRegressionModel.load``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode.
        history: one ``EpochSummary`` per epoch of training.
    """


@constructor(TorchEstimator)
class TorchRegressor(TorchRegressorParams, BaseEstimator[TorchRegressionModel], NumberOutput):
    """Trains a PyTorch model to predict a number, like pyspark.ml's regressors.

    It has the arguments of ``TorchEstimator`` except ``outputCols`` and ``outputType``; ``model``
    and ``optimizer`` are required. One has another default:

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    _model = TorchRegressionModel
