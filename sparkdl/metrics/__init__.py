"""What a model is measured by on rows that it is not trained on: torchmetrics' metrics.

``metrics.py`` has the metrics of one fit, ``states.py`` how what workers have counted travels and
becomes one.
"""

from sparkdl.metrics.metrics import Metrics

__all__ = ["Metrics"]
