"""Measures a model on rows that it is not trained on, by torchmetrics' metrics.

``metrics.py`` has the metrics of one fit; ``states.py`` sends and merges what workers have counted.
"""

from sparkdl.metrics.metrics import Metrics

__all__ = ["Metrics"]
