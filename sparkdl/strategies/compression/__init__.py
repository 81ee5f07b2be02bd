"""Gradients that are sent as something smaller, a way a file."""
