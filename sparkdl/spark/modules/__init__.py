"""Modules of the user's own travel with what needs them, as files.

Why not by value, as cloudpickle can: a function that arrives by value has no source lines in its
traceback and none for ``inspect`` and TorchScript; its module's imports at call time, its siblings
and its data files do not come along; a module that holds a lock or an open file cannot be pickled
at all; and a class is another one in every pickle. What arrives as files is what the driver has
imported: the same names, in results, in saved models, and in processes that a worker starts. What
is lost is what was changed in the driver's memory alone, by assignment to a module's variables.

    units.py     what is the user's own, and what of it travels as one
    texts.py     the files of that, as the driver has imported them
    bundle.py    all that some names need, found through what is imported
    shipment.py  what is sent
    shipping.py  to the executors, once for as long as nothing has changed
    arrival.py   importable there for one task, and nothing left of it after
"""
