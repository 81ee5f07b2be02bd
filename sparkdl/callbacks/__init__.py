"""Hooks that are called during a fit: in the driver, where they may end it, and on workers.

``base.py`` defines callbacks; the other files have ready-made ones.
"""

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.mlflow_run import MLflow
from sparkdl.callbacks.stopping import EarlyStopping, ModelCheckpoint, TimeBudget
from sparkdl.callbacks.tensorboard import TensorBoard, TrainingReport
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
