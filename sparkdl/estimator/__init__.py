"""The pyspark.ml face: ``TorchEstimator`` fits a ``TorchModel``."""

from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
