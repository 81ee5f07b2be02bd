"""One worker of a fit: what it is given, its training loop, and how it meets the others."""

from sparkdl.worker.entry import report_failure, train
from sparkdl.worker.job import Job, Placement

__all__ = ["Job", "Placement", "report_failure", "train"]
