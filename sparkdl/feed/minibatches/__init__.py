"""Minibatches on their way to the device: their order, made ahead of need, in memory that stays."""
