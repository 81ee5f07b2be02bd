"""Predictions for volumes that no memory holds, in chunks, each one Spark task (Chunkflow).

grid.py     where patches, blocks and chunks lie. Arithmetic
blend.py    the weights of overlapping patches, and their sum, which moves along an axis
chunk.py    one chunk, from the store through the network to the store
store.py    where an array is, waiting for its store, and the arrays themselves, by tensorstore
records.py  what an output is the output of, which of its chunks are done, and who writes it
network.py  the model as a network of patches, and its trial in the driver
task.py     what a Spark task does
run.py      what is checked first, the Spark job, the bar; the only one that knows pyspark
"""
