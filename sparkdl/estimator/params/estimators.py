"""The arguments of the estimators, combined from the tables."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sparkdl.estimator.params.columns import (
    ClassParams,
    FeatureParams,
    LabelParams,
    ModuleParams,
    OutputParams,
    PredictionParams,
)
from sparkdl.estimator.params.training import (
    ColumnParams,
    MonitoringParams,
    NetworkParams,
    RecoveryParams,
    RowParams,
    TrainingParams,
    ValidationParams,
    WorkerParams,
)


class EstimatorParams(
    TrainingParams,
    WorkerParams,
    ModuleParams,
    FeatureParams,
    LabelParams,
    ColumnParams,
    RowParams,
    ValidationParams,
    PredictionParams,
    MonitoringParams,
    RecoveryParams,
    NetworkParams,
):
    """What every estimator has."""


class TorchEstimatorParams(EstimatorParams, OutputParams):
    """The arguments of ``TorchEstimator``."""


class TorchClassifierParams(ClassParams, EstimatorParams):
    """The arguments of ``TorchClassifier``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.CrossEntropyLoss())


class TorchRegressorParams(EstimatorParams):
    """The arguments of ``TorchRegressor``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.MSELoss())
