"""The systems that sparkdl is compared with, each doing the same task in its own way."""
