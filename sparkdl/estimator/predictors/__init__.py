"""Estimators for one task each, with the columns that pyspark.ml's own have.

Nothing is imported here, for the reason that ``sparkdl.estimator`` gives.
"""
