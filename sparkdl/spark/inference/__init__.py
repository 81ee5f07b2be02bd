"""Batched inference in executors: Arrow in, Arrow out, one copy of the model a Python process."""
