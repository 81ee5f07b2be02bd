"""Layers that several ranks compute together."""
