"""Train PyTorch models on Spark DataFrames, replicas resident in the executors."""

from sparkdl.checkpoint.module_files import load_module
from sparkdl.checkpoint.recipe import trusted_pickles
from sparkdl.estimator import TorchEstimator, TorchModel
from sparkdl.events import EpochSummary
from sparkdl.spark.session import create_session
from sparkdl.strategies import ParameterAveraging
from sparkdl.version import __version__

__all__ = [
    "EpochSummary",
    "ParameterAveraging",
    "TorchEstimator",
    "TorchModel",
    "__version__",
    "create_session",
    "load_module",
    "trusted_pickles",
]
