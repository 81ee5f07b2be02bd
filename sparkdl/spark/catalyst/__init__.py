"""All that touches private names of Spark's: ``_jvm``, ``_jdf``, and classes of its JVM.

Spark promises nothing about them from one version to the next. So each function here either has a
fall-back in plain PySpark or SQL that gives the same answer, only slower (``fallback.py``), or
raises an error of its own that its caller answers with one: Spark's shuffle in place of grouped or
replanned partitions. Only Hadoop's file systems have no other way in.
"""
