"""Synchronous SGD by an all-reduce of the gradients in every step, and AdaScale on top of it."""
