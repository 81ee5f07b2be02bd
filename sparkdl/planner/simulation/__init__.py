"""Epochs of trainings that have not been run, on clusters that are not there."""
