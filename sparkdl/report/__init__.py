"""What is shown of a training: a recording, its bottlenecks, a summary, a page."""

from sparkdl.report.recording import Recording, Setup
from sparkdl.report.summary import TrainingSummary

__all__ = ["Recording", "Setup", "TrainingSummary"]
