"""Saved models without pickle, and checkpoints of trainings in progress."""
