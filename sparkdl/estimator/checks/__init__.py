"""Checks that run before any worker takes a step."""
