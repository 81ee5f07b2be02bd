"""Elastic averaging, which ties replicas to the center by springs, in all its modes."""
