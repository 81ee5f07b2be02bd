"""Saved models of jobs: a ``TorchModel``, or a ``PipelineModel`` that contains one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyarrow import fs
from pyspark.ml import PipelineModel
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import SparkSession

from sparkdl.checkpoint.trust import trusted_modules
from sparkdl.errors import ConfigError
from sparkdl.estimator.model import TorchModel
from sparkdl.jobs.results.locations import locate


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
