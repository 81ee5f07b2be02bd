"""Ranks as threads or processes without Spark, for tests of models, strategies and this package."""

from sparkdl.testing.world import batches_of, run_world

__all__ = ["batches_of", "run_world"]
