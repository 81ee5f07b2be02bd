"""Asynchronous algorithms: each worker exchanges with the center alone, bounded by a barrier."""
