"""``TorchRegressor``: a PyTorch model in place of one of pyspark.ml's regressors."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import BaseEstimator, TorchEstimator
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.head import Head, output_function
from sparkdl.estimator.params.arguments import arguments_are_params
from sparkdl.estimator.params.outputs import InputOutputParams
from sparkdl.outputs import Widths
from sparkdl.spark.inference.predictor import OutputColumn


class NumberParams(InputOutputParams):
    """Params shared by ``TorchRegressor`` and its model."""

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The column that the model adds; see ``InputOutputParams``."""
        if head.is_classification:
            raise ConfigError(
                "the loss is for classification: use TorchClassifier, or a regression loss, for "
                "example MSELoss"
            )
        if widths.get(None, 0) not in (None, 1):
            shown = widths.get(None)
            raise ConfigError(
                "a regressor's model gives one number per row, but this one gives "
                f"{'several outputs' if shown is None else shown}. Use TorchEstimator, whose "
                "predictionCol holds vectors and whose outputCols name several outputs"
            )
        function, _ = output_function("raw", head, None)
        return [OutputColumn(self.getPredictionCol(), None, function, False)]


class TorchRegressionModel(FittedModel, NumberParams):
    """A trained regressor; adds ``prediction``, a double.

    Made by ``TorchRegressor.fit`` or ``TorchRegressionModel.load``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode.
        history: one ``EpochSummary`` per epoch of training.
    """


class TorchRegressor(BaseEstimator[TorchRegressionModel], NumberParams):
    """Trains a PyTorch model to predict a number, like pyspark.ml's regressors.

    Args:
        loss: (outputs, targets) -> scalar tensor, the mean over the minibatch; ``MSELoss`` by
            default.
        params: all other arguments of ``TorchEstimator`` except ``outputCols`` and ``outputType``;
            ``model`` and ``optimizer`` are required.

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    def __init__(
        self,
        *,
        loss: Any = nn.MSELoss(),  # noqa: B008 # it has no state
        **params: Any,
    ) -> None:
        super().__init__()

    __init__ = arguments_are_params(  # type: ignore[method-assign]
        __init__, like=TorchEstimator.__init__, without=("outputCols", "outputType")
    )

    def _model(self, *args: Any, **kwargs: Any) -> TorchRegressionModel:
        return TorchRegressionModel(*args, **kwargs)
