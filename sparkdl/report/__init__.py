"""What becomes of a training to look at: a recording, what bounds it, a summary, a page."""

from sparkdl.report.recording import Recording, Setup
from sparkdl.report.summary import TrainingSummary

__all__ = ["Recording", "Setup", "TrainingSummary"]
