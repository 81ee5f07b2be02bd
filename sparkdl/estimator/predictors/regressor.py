"""``TorchRegressor``: a PyTorch model in place of one of pyspark.ml's regressors."""

from __future__ import annotations

from typing import Any

from sparkdl.estimator.estimator import BaseEstimator
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.outputs import NumberOutput
from sparkdl.estimator.params.declaration import constructor
from sparkdl.estimator.params.estimators import TorchEstimatorParams, TorchRegressorParams


class TorchRegressionModel(FittedModel, NumberOutput):
    """A trained regressor; adds ``prediction``, a double.

    Made by ``TorchRegressor.fit`` or ``TorchRegressionModel.load``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode.
        history: one ``EpochSummary`` per epoch of training.
    """


@constructor(TorchEstimatorParams)
class TorchRegressor(TorchRegressorParams, NumberOutput, BaseEstimator[TorchRegressionModel]):
    """Trains a PyTorch model to predict a number, like pyspark.ml's regressors.

    It has the arguments of ``TorchEstimator`` except ``outputCols`` and ``outputType``; ``model``
    and ``optimizer`` are required. One has another default:

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    def _model(self, *args: Any, **kwargs: Any) -> TorchRegressionModel:
        return TorchRegressionModel(*args, **kwargs)
