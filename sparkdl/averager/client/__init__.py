"""A worker's end: its connection to the averager, and what it sends and takes over it."""
