"""Runs the user's own functions and scripts on every worker."""
