"""Synchronous SGD by an all-reduce of the gradients in every step, and what it does to them."""
