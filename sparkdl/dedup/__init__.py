"""Near-duplicate rows: pictures and texts that are all but equal, found by 64-bit hashes.

Nothing else is imported here: the executors' tasks need only what computes the hashes.
"""

import sparkdl.spark  # noqa: F401 # refuses a Spark that is too old
