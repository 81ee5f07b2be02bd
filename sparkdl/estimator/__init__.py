"""The pyspark.ml face: ``TorchEstimator`` fits a ``TorchModel``.

Nothing is imported here: executors are sent functions of this package, and would import all that
fits a model before they predict with one.
"""
