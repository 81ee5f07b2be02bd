"""A worker's end: its connection to the averager, and what it sends and receives over it."""
