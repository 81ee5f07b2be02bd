"""An archive of the classes that Spark loads, which Java maps instead of loading them one by one.

Starting Spark and running its first job loads some 12,000 classes in the driver's JVM and 9,000 in
each executor's, which takes the same seconds of processor time every time. Java keeps the loaded
classes in a file if asked to (JEP 350, "Dynamic CDS Archives"); ``sparkdl-prepare`` asks it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

DRIVER_OPTIONS = "spark.driver.defaultJavaOptions"
EXECUTOR_OPTIONS = "spark.executor.defaultJavaOptions"


def archive_path(java: Path) -> Path:
    """Where the archive for this Java and this Spark is, or would be.

    Its name identifies both, so an upgrade of either needs a new archive.

    Args:
        java: the program.
    """
    java = java.resolve()
    release = java.parent.parent / "release"
    digest = hashlib.sha256(f"{java}\n".encode())
    digest.update(release.read_bytes() if release.exists() else b"")
    jars = Path(_find_spark_home()) / "jars"
    for jar in sorted(os.scandir(jars), key=lambda entry: entry.name):
        # Java compares size and time of every jar before it trusts an archive.
        digest.update(f"{jar.path} {jar.stat().st_size} {jar.stat().st_mtime_ns}\n".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sparkdl" / f"spark-classes-{digest.hexdigest()[:12]}.jsa"


def archive_option(path: Path) -> str:
    """The option that makes a JVM use the archive; if it does not fit, Java goes on without."""
    return f"-XX:SharedArchiveFile={path}"


def archive_settings(java: Path, master: str | None) -> dict[str, str]:
    """Spark settings that use this machine's archive; none if it has none.

    Args:
        java: the program that the driver's JVM runs.
        master: as given to the session's builder. Only a ``local-cluster`` is known to have its
            executors on this machine; elsewhere the archive may be missing, and a JVM that is
            pointed at a missing one goes without Java's own as well.
    """
    path = archive_path(java)
    if not path.exists():
        return {}
    settings = {DRIVER_OPTIONS: archive_option(path)}
    if (master or "").startswith("local-cluster"):
        settings[EXECUTOR_OPTIONS] = archive_option(path)
    return settings
