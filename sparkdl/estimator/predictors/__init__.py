"""Estimators for one task each, with the columns of pyspark.ml's own.

Nothing is imported here, for the reason given in ``sparkdl.estimator``.
"""
