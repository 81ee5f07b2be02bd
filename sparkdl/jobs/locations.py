"""Where outputs and saved models are, according to how Spark reads their paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyarrow import fs
from pyspark.ml import PipelineModel
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import SparkSession

from sparkdl.checkpoint.trust import trusted_modules
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import ConfigError
from sparkdl.estimator.model import TorchModel
from sparkdl.jobs.output import Location
from sparkdl.redaction import without_credentials
from sparkdl.spark.catalyst.cluster import hadoop_files
from sparkdl.spark.storage.files import java_errors, open_hadoop

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


def load_model(path: str, trust: Sequence[str], spark: SparkSession) -> Any:
    """Load a model saved by train.py or anything else.

    Args:
        path: where it is.
        trust: modules that the model's own classes come from.
        spark: the session.

    Raises:
        ConfigError: there is none, or it needs modules that are not trusted.
    """
    location = locate(path)
    there = location.files.get_file_info(f"{location.path}/metadata")
    if there.type != fs.FileType.Directory:
        raise ConfigError(
            f"there is no model at {path}: it has no 'metadata' folder. Give the directory that "
            "train.py wrote, or that a model was saved to"
        )
    kind = str(DefaultParamsReader.loadMetadata(path, spark).get("class"))
    with trusted_modules(*trust):
        if kind in ("pyspark.ml.pipeline.PipelineModel", "org.apache.spark.ml.PipelineModel"):
            return PipelineModel.load(path)
        return TorchModel.load(path)


def torch_model(model: Any) -> TorchModel:
    """The network's model inside it."""
    if isinstance(model, PipelineModel):
        return next(stage for stage in reversed(model.stages) if isinstance(stage, TorchModel))
    assert isinstance(model, TorchModel)
    return model
