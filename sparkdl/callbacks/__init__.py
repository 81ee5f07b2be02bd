"""What is called in the driver while a fit goes on, and may end it.

``base.py`` has what every callback is; the others are ready to be used.
"""

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.early_stopping import EarlyStopping
from sparkdl.callbacks.model_checkpoint import ModelCheckpoint
from sparkdl.callbacks.time_budget import TimeBudget

__all__ = ["Callback", "EarlyStopping", "ModelCheckpoint", "TimeBudget", "Training"]
