"""What each estimator's constructor takes besides ``FitSettings``, and its own defaults."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sparkdl.estimator.params.columns import ClassParams, OutputParams
from sparkdl.estimator.params.declaration import DeclaredParams
from sparkdl.estimator.params.training import TrainingParams


class TorchEstimatorParams(OutputParams):
    """The arguments of ``TorchEstimator``."""


class TorchClassifierParams(ClassParams):
    """The arguments of ``TorchClassifier``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.CrossEntropyLoss())


class TorchRegressorParams(DeclaredParams):
    """The arguments of ``TorchRegressor``."""

    loss = replace(TrainingParams.declarations["loss"], default=nn.MSELoss())
