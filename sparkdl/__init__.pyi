"""The public names, and where each is: the one list that ``__init__.py`` imports them by."""

from sparkdl.checkpoint.module_files import load_module as load_module
from sparkdl.checkpoint.trust import trusted_modules as trusted_modules
from sparkdl.checkpoint.trust import trusted_pickles as trusted_pickles
from sparkdl.dedup.model import NearDuplicatesModel as NearDuplicatesModel
from sparkdl.dedup.near_duplicates import NearDuplicates as NearDuplicates
from sparkdl.estimator.classifier import (
    TorchClassificationModel as TorchClassificationModel,
)
from sparkdl.estimator.classifier import TorchClassifier as TorchClassifier
from sparkdl.estimator.classifier import TorchRegressionModel as TorchRegressionModel
from sparkdl.estimator.classifier import TorchRegressor as TorchRegressor
from sparkdl.estimator.estimator import TorchEstimator as TorchEstimator
from sparkdl.estimator.model import TorchModel as TorchModel
from sparkdl.estimator.probing import plan as plan
from sparkdl.events import EpochSummary as EpochSummary
from sparkdl.large_batches import LAMB as LAMB
from sparkdl.large_batches import LARS as LARS
from sparkdl.parallel.model import parallelize_3d as parallelize_3d
from sparkdl.planner.layers import layer_balance as layer_balance
from sparkdl.protocols import Batch as Batch
from sparkdl.report.simulation import simulate as simulate
from sparkdl.spark.functions.run import TorchDistributor as TorchDistributor
from sparkdl.spark.functions.run import run as run
from sparkdl.spark.functions.worker import FunctionWorker as FunctionWorker
from sparkdl.spark.functions.worker import current_worker as current_worker
from sparkdl.spark.functions.worker import load_checkpoint as load_checkpoint
from sparkdl.spark.session import create_session as create_session
from sparkdl.strategies import AdaScale as AdaScale
from sparkdl.strategies import AsynchronousSGD as AsynchronousSGD
from sparkdl.strategies import ColorTrees as ColorTrees
from sparkdl.strategies import ElasticAveraging as ElasticAveraging
from sparkdl.strategies import GossipAveraging as GossipAveraging
from sparkdl.strategies import GradientAllReduce as GradientAllReduce
from sparkdl.strategies import Hybrid as Hybrid
from sparkdl.strategies import KFACPreconditioner as KFACPreconditioner
from sparkdl.strategies import OuterOptimizer as OuterOptimizer
from sparkdl.strategies import OuterSGD as OuterSGD
from sparkdl.strategies import ParameterAveraging as ParameterAveraging
from sparkdl.strategies import ThresholdGradientSharing as ThresholdGradientSharing
from sparkdl.version import __version__ as __version__
