"""All that touches private names of Spark's: ``_jvm``, ``_jdf``, and classes of its JVM.

Spark promises nothing about them from one version to the next. So each function here has a
fall-back in plain PySpark or SQL that gives the same answer, only slower (``jvm.with_fallback``).
Only Hadoop's file systems have no other way in.
"""
