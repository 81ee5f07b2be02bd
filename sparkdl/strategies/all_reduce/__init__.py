"""Synchronous SGD, by an all-reduce of the gradients in every step; and AdaScale, built on it."""
