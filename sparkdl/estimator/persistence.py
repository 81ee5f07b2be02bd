"""Saving and loading of estimator and model, in pyspark.ml's layout so that pipelines find them.

metadata/part-00000   the Params, as every pyspark.ml stage has them
*.json, *.safetensors, *.pkl   what is not JSON; see ``checkpoint``
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.ml.param import Params
from pyspark.ml.util import MLReader, MLWriter

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.checkpoint.recipe import load_recipe, save_recipe
from sparkdl.errors import ConfigError
from sparkdl.spark.files import fetch, publish

OBJECTS = "objects.json"


class DirectoryWriter(MLWriter):
    """Writes a stage as one directory, published when complete."""

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Save to a path on any file system that Spark knows.

        Raises:
            ConfigError: something is there already and ``overwrite()`` was not called.
        """
        with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as scratch:
            directory = Path(scratch)
            objects = self._objects()
            self._write_metadata(directory, leave_out=set(objects))
            self._write_files(directory, objects)
            publish(directory, path, overwrite=self.shouldOverwrite)

    def _objects(self) -> dict[str, Any]:
        """Params whose values are not JSON."""
        return {}

    def _write_files(self, directory: Path, objects: dict[str, Any]) -> None:
        saved = {name: save_recipe(value, directory, name) for name, value in objects.items()}
        (directory / OBJECTS).write_text(json.dumps(saved, indent=2))

    def _write_metadata(self, directory: Path, leave_out: set[str]) -> None:
        instance = self.instance

        def values(params: dict[Any, Any]) -> dict[str, Any]:
            return {p.name: value for p, value in params.items() if p.name not in leave_out}

        metadata = {
            "class": f"{type(instance).__module__}.{type(instance).__qualname__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": pyspark.__version__,
            "uid": instance.uid,
            "paramMap": values(instance._paramMap),
            "defaultParamMap": values(instance._defaultParamMap),
            "defaultObjects": sorted(name for name in leave_out if not instance.isSet(name)),
        }
        (directory / "metadata").mkdir()
        (directory / "metadata" / "part-00000").write_text(json.dumps(metadata) + "\n")


class EstimatorWriter(DirectoryWriter):
    """Writes a ``TorchEstimator``: its objects by import path where they have one."""

    def _objects(self) -> dict[str, Any]:
        names = ("model", "loss", "optimizer", "scheduler", "strategy", "batchTransform")
        values = {name: self.instance.getOrDefault(name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class ModelWriter(DirectoryWriter):
    """Writes a ``TorchModel``."""

    def __init__(self, instance: Params, saved: SavedModule) -> None:
        super().__init__(instance)
        self.saved = saved

    def _write_files(self, directory: Path, objects: dict[str, Any]) -> None:
        write_module(self.saved, directory)


class EstimatorReader(MLReader[Any]):
    """Reads a ``TorchEstimator``."""

    def __init__(self, kind: Any, *, trust: bool) -> None:
        super().__init__()
        self._kind = kind
        self._trust = trust

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows."""
        with fetch(path) as directory:
            metadata = read_metadata(directory)
            saved = _read_json(directory / OBJECTS)
            objects = {
                name: load_recipe(recipe, directory, name, trust=self._trust)
                for name, recipe in saved.items()
            }
        defaults = {name: objects.pop(name) for name in metadata.get("defaultObjects", ())}
        estimator = restore_params(self._kind(**objects), metadata)
        return estimator._setDefault(**defaults)


class ModelReader(MLReader[Any]):
    """Reads a ``TorchModel``; ``make`` builds it from what was saved."""

    def __init__(self, make: Any, *, trust: bool) -> None:
        super().__init__()
        self._make = make
        self._trust = trust

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows; a local one needs no Spark."""
        with fetch(path) as directory:
            metadata = read_metadata(directory)
            return restore_params(self._make(read_module(directory, trust=self._trust)), metadata)


def read_metadata(directory: Path) -> dict[str, Any]:
    """Read the Params of a saved stage.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = directory / "metadata" / "part-00000"
    if not path.is_file():
        raise ConfigError(f"there is no saved stage in {directory}: metadata/ is missing")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged: {error}") from error
    return values


def restore_params(instance: Any, metadata: dict[str, Any]) -> Any:
    """Give a freshly built stage the uid and the Params that were saved."""
    instance._resetUid(metadata["uid"])
    instance._set(**metadata["paramMap"])
    instance._setDefault(**metadata["defaultParamMap"])
    return instance
