"""The pyspark.ml interface: ``TorchEstimator`` fits a ``TorchModel``.

Nothing else is imported here: executors receive functions from this package, and would otherwise
import everything that fits a model just to predict with one.
"""

import sparkdl.spark  # noqa: F401 # refuses a Spark that is too old
