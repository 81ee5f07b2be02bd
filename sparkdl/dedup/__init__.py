"""Near-duplicate rows: pictures and texts that are all but equal, found by 64-bit hashes.

Nothing is imported here: the executors' tasks need only what computes the hashes.
"""
