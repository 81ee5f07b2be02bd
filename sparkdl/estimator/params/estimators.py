"""The arguments of the estimators, combined from the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sparkdl.estimator.params.columns import (
    ClassParams,
    ColumnParams,
    FeatureParams,
    InvalidParams,
    LabelParams,
    ModuleParams,
    OutputParams,
    PredictionParams,
)
from sparkdl.estimator.params.declaration import DeclaredParams, field_of
from sparkdl.estimator.params.training import (
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
    InvalidParams,
    RowParams,
    ValidationParams,
    PredictionParams,
    MonitoringParams,
    RecoveryParams,
    NetworkParams,
):
    """What every estimator has."""


class ParamValues:
    """The values of an estimator's Params, ``batch_size`` for ``batchSize``; None if it is not set.

    They stay as they are when this is made.
    """

    def __init__(self, params: DeclaredParams) -> None:
        for name in EstimatorParams.declarations:
            given = params.getOrDefault(name) if params.isDefined(name) else None
            vars(self)[field_of(name)] = given

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} stays as it was when fit was called")


class TorchEstimatorParams(EstimatorParams, OutputParams):
    """The arguments of ``TorchEstimator``."""


class TorchClassifierParams(ClassParams, EstimatorParams):
    """The arguments of ``TorchClassifier``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.CrossEntropyLoss())


class TorchRegressorParams(EstimatorParams):
    """The arguments of ``TorchRegressor``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.MSELoss())
