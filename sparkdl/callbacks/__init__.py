"""Hooks that are called during a fit: in the driver, where they may end it, and on workers.

``base.py`` defines callbacks; the other files have ready-made ones.
"""

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.best_epoch import ModelCheckpoint
from sparkdl.callbacks.mlflow_run import MLflow
from sparkdl.callbacks.stopping import EarlyStopping, TimeBudget
from sparkdl.callbacks.tensorboard import TensorBoard
from sparkdl.callbacks.training_report import TrainingReport
from sparkdl.worker_callback import Hooks, WorkerCallback, WorkerStep

__all__ = [
    "Callback",
    "EarlyStopping",
    "Hooks",
    "MLflow",
    "ModelCheckpoint",
    "TensorBoard",
    "TimeBudget",
    "Training",
    "TrainingReport",
    "WorkerCallback",
    "WorkerStep",
]
