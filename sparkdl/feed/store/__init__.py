"""The partition store: a worker's rows on its own host, in memory-mapped files."""
