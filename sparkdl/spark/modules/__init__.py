"""The user's own modules travel, as files, with whatever needs them.

Why not by value, as cloudpickle can: a function that arrives by value has no source lines in its
traceback and none for ``inspect`` and TorchScript; what its module imports at call time, its
siblings and its data files do not come along; a module that holds a lock or an open file cannot be
pickled at all; and a class is a different one in every pickle. What arrives as files is what the
driver has imported, under the same names: in results, in saved models, and in processes that a
worker starts. Only changes made in the driver's memory, by assigning to module variables, are lost.

    shipping.py  finds all that some names need, and sends it, once for as long as nothing changes
    arrival.py   makes it importable there for one task, and leaves no trace of it
"""
