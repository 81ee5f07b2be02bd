"""What becomes of a training to look at: a recording, what bounds it, a summary, a page."""

from sparkdl.report.recording import Failure, Recording, Setup
from sparkdl.report.summary import TrainingSummary

__all__ = ["Failure", "Recording", "Setup", "TrainingSummary"]
