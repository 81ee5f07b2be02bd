"""The Params of the estimators, combined from those of each group."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.columns import ColumnParams
from sparkdl.estimator.params.monitoring import MonitoringParams
from sparkdl.estimator.params.network import NetworkParams
from sparkdl.estimator.params.outputs import InputOutputParams
from sparkdl.estimator.params.recovery import RecoveryParams
from sparkdl.estimator.params.rows import RowParams
from sparkdl.estimator.params.training import TrainingParams
from sparkdl.estimator.params.validation import ValidationParams
from sparkdl.estimator.params.workers import WorkerParams
from sparkdl.protocols import LossFunction
from sparkdl.redaction import without_credentials
from sparkdl.replica.losses import ModelLoss


class EstimatorParams(
    InputOutputParams,
    TrainingParams,
    WorkerParams,
    ColumnParams,
    RowParams,
    ValidationParams,
    MonitoringParams,
    RecoveryParams,
    NetworkParams,
):
    """Params of every estimator; the docstring of ``TorchEstimator`` says what each is for."""

    def explainParam(self, param: str | Param[Any]) -> str:
        """A Param's name, doc, default and value, without the credentials of URIs."""
        return without_credentials(super().explainParam(param))

    def loss_function(self) -> LossFunction:
        """The loss to train with.

        Raises:
            ConfigError: it is the model's own, and another Param does not go with that.
        """
        if not isinstance(self.getLoss(), str):
            loss: LossFunction = self.getLoss()
            return loss
        if self.optional_column("weightCol") is not None:
            raise ConfigError(
                "weightCol cannot be combined with loss='model': a model that computes its own "
                "loss gives no value per row to weight. Drop one of the two"
            )
        keywords = tuple(self.getLabelCols() or ["labels"])
        both = set(keywords) & set(self.feature_columns()) if self.getFeaturesAsKwargs() else set()
        if both:
            raise ConfigError(
                f"the model would be given '{min(both)}' twice: as a feature (featuresAsKwargs) "
                "and as a label (loss='model'). Remove it from featuresCols"
            )
        return ModelLoss(keywords)
