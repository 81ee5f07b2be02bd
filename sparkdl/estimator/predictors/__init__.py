"""Estimators for one task each, with the columns that pyspark.ml's own have."""

from sparkdl.estimator.predictors.classifier import TorchClassificationModel, TorchClassifier
from sparkdl.estimator.predictors.regressor import TorchRegressionModel, TorchRegressor

__all__ = [
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchRegressionModel",
    "TorchRegressor",
]
