"""Where an output is, as Spark reads its path."""

from __future__ import annotations

import os

from sparkdl.checkpoint.local_files import LocalFiles
from sparkdl.errors import ConfigError
from sparkdl.jobs.results.output import Location
from sparkdl.spark.storage.files import hadoop_files, java_errors
from sparkdl.spark.storage.hadoop_files import open_hadoop

RENAMING = ("hdfs", "viewfs")
"""Of Hadoop's file systems those that rename a directory at once, as its own specification asks;
object stores copy file by file, and of others it is not known."""


def locate(path: str) -> Location:
    """The location that a path means to Spark: with a scheme, or on the default file system.

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
        raise ConfigError(f"'{path}' cannot be reached: {error}") from error
    return Location(files=opened, path=root.rstrip("/"), renames=scheme in RENAMING)


def spark_path(location: Location, path: str) -> str:
    """A path in a location, as Spark takes it whatever its default file system is."""
    return f"file://{path}" if isinstance(location.files, LocalFiles) else path
