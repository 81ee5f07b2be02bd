"""Everything that knows about Spark: sessions, slots, checks, launching workers, inference."""

import pyspark

from sparkdl.errors import SetupError

# A cluster's spark-submit puts its own pyspark before the one that pip has installed.
if tuple(map(int, pyspark.__version__.split(".")[:2])) < (3, 5):
    raise SetupError(
        f"sparkdl needs Spark 3.5 or newer, and this is Spark {pyspark.__version__} "
        f"({pyspark.__path__[0]}): submit to a cluster with a newer one, or, if it has one, unset "
        "SPARK_HOME and PYTHONPATH"
    )
