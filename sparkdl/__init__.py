"""Train PyTorch models on Spark DataFrames, replicas resident in the executors.

The names below are the public face. They are imported on first use: a worker needs a small part of
this package, and every import there delays the first step of a fit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkdl.version import __version__

if TYPE_CHECKING:
    from sparkdl.checkpoint.module_files import load_module
    from sparkdl.checkpoint.trust import trusted_modules, trusted_pickles
    from sparkdl.estimator.estimator import TorchEstimator
    from sparkdl.estimator.model import TorchModel
    from sparkdl.estimator.predictors.classifier import TorchClassificationModel, TorchClassifier
    from sparkdl.estimator.predictors.regressor import TorchRegressionModel, TorchRegressor
    from sparkdl.events import EpochSummary
    from sparkdl.large_batches import LAMB, LARS
    from sparkdl.protocols import Batch
    from sparkdl.spark.functions.run import run
    from sparkdl.spark.functions.torch_distributor import TorchDistributor
    from sparkdl.spark.functions.worker import FunctionWorker, current_worker, load_checkpoint
    from sparkdl.spark.session.session import create_session
    from sparkdl.strategies import (
        AdaScale,
        AsynchronousSGD,
        ElasticAveraging,
        GossipAveraging,
        GradientAllReduce,
        KFACPreconditioner,
        OuterOptimizer,
        OuterSGD,
        ParameterAveraging,
        ThresholdGradientSharing,
    )

__all__ = [
    "LAMB",
    "LARS",
    "AdaScale",
    "AsynchronousSGD",
    "Batch",
    "ElasticAveraging",
    "EpochSummary",
    "FunctionWorker",
    "GossipAveraging",
    "GradientAllReduce",
    "KFACPreconditioner",
    "OuterOptimizer",
    "OuterSGD",
    "ParameterAveraging",
    "ThresholdGradientSharing",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchDistributor",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "__version__",
    "create_session",
    "current_worker",
    "load_checkpoint",
    "load_module",
    "run",
    "trusted_modules",
    "trusted_pickles",
]

_HOMES = {
    "LAMB": "sparkdl.large_batches",
    "LARS": "sparkdl.large_batches",
    "AdaScale": "sparkdl.strategies",
    "AsynchronousSGD": "sparkdl.strategies",
    "Batch": "sparkdl.protocols",
    "ElasticAveraging": "sparkdl.strategies",
    "EpochSummary": "sparkdl.events",
    "FunctionWorker": "sparkdl.spark.functions.worker",
    "GossipAveraging": "sparkdl.strategies",
    "GradientAllReduce": "sparkdl.strategies",
    "KFACPreconditioner": "sparkdl.strategies",
    "OuterOptimizer": "sparkdl.strategies",
    "OuterSGD": "sparkdl.strategies",
    "ParameterAveraging": "sparkdl.strategies",
    "ThresholdGradientSharing": "sparkdl.strategies",
    "TorchClassificationModel": "sparkdl.estimator.predictors.classifier",
    "TorchClassifier": "sparkdl.estimator.predictors.classifier",
    "TorchDistributor": "sparkdl.spark.functions.torch_distributor",
    "TorchEstimator": "sparkdl.estimator.estimator",
    "TorchModel": "sparkdl.estimator.model",
    "TorchRegressionModel": "sparkdl.estimator.predictors.regressor",
    "TorchRegressor": "sparkdl.estimator.predictors.regressor",
    "create_session": "sparkdl.spark.session.session",
    "current_worker": "sparkdl.spark.functions.worker",
    "load_checkpoint": "sparkdl.spark.functions.worker",
    "load_module": "sparkdl.checkpoint.module_files",
    "run": "sparkdl.spark.functions.run",
    "trusted_modules": "sparkdl.checkpoint.trust",
    "trusted_pickles": "sparkdl.checkpoint.trust",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkdl' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
