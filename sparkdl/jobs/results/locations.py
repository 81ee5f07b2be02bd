"""Where an output is, according to how Spark reads its path."""

from __future__ import annotations

import os

from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import ConfigError
from sparkdl.jobs.results.output import Location
from sparkdl.redaction import without_credentials
from sparkdl.spark.storage.files import hadoop_files, java_errors
from sparkdl.spark.storage.hadoop_files import open_hadoop

RENAMING = ("hdfs", "viewfs")
"""Hadoop's file systems that rename a directory atomically, as its specification requires; object
stores copy file by file, and others are unknown."""


def locate(path: str) -> Location:
    """The location that Spark takes a path for: with a scheme, or on the default file system.

    Args:
        path: a directory.

    Raises:
        ConfigError: Hadoop does not know the scheme, or the path is a whole file system.
    """
    try:
        with java_errors():
            files, paths = hadoop_files(path)
            uri = files.makeQualified(paths(path)).toUri()
            scheme, inside = uri.getScheme(), str(uri.getPath())
        if inside.strip("/") == "":
            raise ConfigError(f"'{path}' is the root of a file system. Give a directory in it")
        if scheme == "file":
            real = os.path.realpath(inside)
            return Location(files=LocalFiles(), path=real, renames=True)
        opened, root = open_hadoop(path)
    except OSError as error:
        shown = without_credentials(f"'{path}' cannot be reached: {error}")
        raise ConfigError(shown) from error
    return Location(files=opened, path=root.rstrip("/"), renames=scheme in RENAMING)


def spark_path(location: Location, path: str) -> str:
    """A path in a location, in a form that does not depend on Spark's default file system."""
    return f"file://{path}" if isinstance(location.files, LocalFiles) else path
