"""Batched inference in executors: Arrow in, Arrow out, one model copy per Python process."""
