"""Training, evaluation and prediction as jobs: one grammar, exit codes, all-or-nothing outputs.

``jobs/train.py``, ``evaluate.py`` and ``predict.py`` call ``train``, ``evaluate`` and ``predict``.
"""

from sparkdl.jobs.sources import Files, Query, Source, Table

__all__ = ["Files", "Query", "Source", "Table"]
