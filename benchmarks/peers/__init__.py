"""The systems that sparkdl is measured against, each doing the same task in its own way."""
