"""Gradient sharing: only what exceeds a threshold is sent."""
