"""Outer optimizers: the center takes a step from what the workers have changed."""
