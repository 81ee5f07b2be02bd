"""Asynchronous algorithms: each worker exchanges with the center alone, within a barrier."""
