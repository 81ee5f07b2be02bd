"""Saving and loading of estimator and model, in pyspark.ml's layout so that pipelines find them.

metadata/part-00000   the Params, as every pyspark.ml stage has them
*.json, *.safetensors, *.pkl   values that are not plain JSON; see ``checkpoint``
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
from pyspark.ml.param import Params
from pyspark.ml.util import MLReader, MLWriter
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparkdl import callbacks, strategies
from sparkdl.checkpoint.module_files import read_json_object
from sparkdl.checkpoint.object_spec import LOSS, MODEL, Expected, load_object, save_object
from sparkdl.checkpoint.trust import TrustArgument, classes_of
from sparkdl.errors import CheckpointError, ConfigError, SparkDLError
from sparkdl.estimator.params.declaration import DeclaredParams, described
from sparkdl.redaction import shown
from sparkdl.spark.catalyst.versions import searched_grid
from sparkdl.spark.files import fetch, publish

OBJECTS = "objects.json"
EXPECTED = {
    "model": MODEL,
    "loss": LOSS,
    "optimizer": Expected(
        "a class of optimizers, or a function that makes one", Optimizer, maker=True
    ),
    "scheduler": Expected(
        "a class of schedulers, or a function that makes one", LRScheduler, maker=True
    ),
    "strategy": Expected(
        "a strategy",
        strategies.Strategy,
        instance=True,
        harmless={
            **classes_of(strategies, strategies.Strategy),
            **classes_of(strategies, strategies.Barrier),
            **classes_of(strategies, strategies.CenterUpdate),
            **classes_of(strategies, strategies.KFACPreconditioner),
            **classes_of(strategies, strategies.Hybrid),
            **classes_of(strategies, strategies.ColorTrees),
        },
    ),
    "callbacks": Expected(
        "a list of callbacks",
        callbacks.Hooks,
        instance=True,
        several=True,
        harmless=classes_of(callbacks, callbacks.Hooks),
    ),
    "metrics": Expected("a dict of metrics by name", dict, instance=True),
    "batchTransform": Expected("a function", nn.Module, instance=True, function=True),
}
"""The estimator's Params whose values are not JSON."""


_DEFAULTS: tuple[list[str], ...] = ([], ["strategy"], ["loss"], ["loss", "strategy"])
"""Those of them that may have been left at their default."""


_OTHERWISE = {
    "optimizer": "Search over learningRate, or over names such as 'Adam'",
    "strategy": "Give what is to differ in the strategy, for example {'period': 10}",
}


_PACKAGES = ("sparkdl.", "pyspark.", "org.apache.spark.")
"""Whose classes of stages can be told apart by their names alone."""


def require_savable_grid(estimator: Params) -> None:
    """Check that the search which an estimator is fitted for can be saved once it is over.

    Raises:
        ConfigError: a value in its grid is not JSON, as which pyspark.ml saves it.
    """
    for param, value in (item for values in searched_grid() for item in values.items()):
        if param.parent != estimator.uid:
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            others = "Leave it out" if param.name in EXPECTED else "ParamGridBuilder converts it"
            way = _OTHERWISE.get(param.name, others)
            raise ConfigError(
                f"the grid has {described(value)!s:.100} for {param.name}, with which pyspark.ml "
                "could not save the search once it is over: only numbers, texts, lists and dicts "
                f"of them can be saved there. {way}; or fit each of its settings without a search: "
                "estimator.fit(df, grid) returns a list of models"
            ) from error


class DirectoryWriter(MLWriter):
    """Writes a stage as one directory, published when complete.

    An estimator's objects are named by their import path where they have one.

    Args:
        instance: the stage.
        write_more: writes what is no Param into the directory.
    """

    def __init__(
        self, instance: DeclaredParams, write_more: Callable[[Path], None] = lambda directory: None
    ) -> None:
        super().__init__()
        self.instance, self._write_more = instance, write_more

    def save(self, path: str) -> None:
        """Save to a path on any file system that Spark knows.

        Raises:
            ConfigError: something is there already and ``overwrite()`` was not called.
            CheckpointError: the disk is full, or cannot be written to.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="sparkdl-save-") as scratch:
                self._save(Path(scratch), path)
        except OSError as error:
            raise CheckpointError(
                f"{shown(path)} could not be written: it is put together among temporary files in "
                f"{tempfile.tempdir or 'TMPDIR'} first, and there: {error}. Set TMPDIR to a folder "
                "with more space. What was there before is unchanged"
            ) from error

    def _save(self, directory: Path, path: str) -> None:
        # A Param that a user's own subclass adds is plain, whatever its name.
        given = (name for name in EXPECTED if name in self.instance.declarations)
        values = {name: self.instance.getOrDefault(name) for name in given}
        # A text is loss="model", or the name of an optimizer.
        objects = {n: v for n, v in values.items() if v is not None and not isinstance(v, str)}
        self._write_metadata(directory, leave_out=set(objects))
        if objects:
            saved = {name: save_object(each, directory, name) for name, each in objects.items()}
            (directory / OBJECTS).write_text(json.dumps(saved, indent=2))
        self._write_more(directory)
        publish(directory, path, overwrite=self.shouldOverwrite)

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


class StageReader(MLReader[Any]):
    """Reads a stage.

    Args:
        kind: its class.
        make: builds it of the directory and the metadata, but for its Params.
    """

    def __init__(self, kind: type, make: Callable[[Path, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._kind, self._make = kind, make

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows; a local one needs no Spark."""
        with fetch(path) as directory:
            try:
                metadata = read_metadata(directory)
                _require_class(self._kind, metadata, directory)
                return restore_params(self._make(directory, metadata), metadata)
            except ConfigError as error:
                # What was read may be a copy, which nobody else has seen.
                told = str(error).replace(str(directory), shown(path))
                raise ConfigError(told) from error.__cause__


def _require_class(kind: type, metadata: dict[str, Any], directory: Path) -> None:
    """Check that a stage of ours or of Spark's is read as what it was saved as.

    A user's own class may be read as the class that it extends, and the other way round.

    Raises:
        ConfigError: it is not.
    """
    package, _, saved = str(metadata.get("class")).rpartition(".")
    if not f"{package}.".startswith(_PACKAGES) or saved in (each.__name__ for each in kind.__mro__):
        return
    raise ConfigError(
        f"what is in {directory} was saved as {saved}, and not as {kind.__name__}. "
        f"Call {saved}.load"
    )


def read_estimator(
    kind: Any, trust: TrustArgument, directory: Path, metadata: dict[str, Any]
) -> Any:
    """An estimator with the saved objects."""
    saved = read_json_object(directory / OBJECTS)
    saved_plainly = {"loss", "optimizer"} & metadata["paramMap"].keys()
    if not {"model", "loss", "optimizer"} <= {*saved, *saved_plainly} <= EXPECTED.keys():
        raise ConfigError(f"{directory / OBJECTS} is damaged: it contains {[*saved]!r:.200}")
    objects = {
        name: load_object(spec, directory, name, expected=EXPECTED[name], trust=trust)
        for name, spec in saved.items()
    }
    defaults = metadata.get("defaultObjects", [])
    if defaults not in _DEFAULTS or not saved.keys() >= set(defaults):
        raise ConfigError(f"{directory} is damaged: defaultObjects is {defaults!r:.200}")
    given = {name: each for name, each in objects.items() if name not in defaults}
    given |= {name: metadata["paramMap"][name] for name in saved_plainly}
    return kind(**given)._setDefault(**{name: objects[name] for name in defaults})


def read_metadata(directory: Path) -> dict[str, Any]:
    """Read the Params of a saved stage.

    Raises:
        ConfigError: there is no stage, or it is damaged.
    """
    # Spark's own stages have longer names there.
    path = min((directory / "metadata").glob("part-00000*"), default=None)
    if path is None or not path.is_file():
        raise ConfigError(f"there is no saved stage in {directory}: metadata/ is missing")
    metadata = read_json_object(path)
    kinds = {"uid": str, "paramMap": dict, "defaultParamMap": dict}
    for name, kind in kinds.items():
        if not isinstance(metadata.get(name), kind):
            raise ConfigError(f"{path} is damaged: it has no {name}")
    return metadata


def restore_params(instance: Any, metadata: dict[str, Any]) -> Any:
    """Give a freshly built stage the uid and the Params that were saved.

    Raises:
        ConfigError: there is no such Param, or it cannot have that value.
    """
    given, defaults = metadata["paramMap"], metadata["defaultParamMap"]
    unknown = [name for name in (*given, *defaults) if not instance.hasParam(name)]
    if unknown:
        raise ConfigError(
            f"the saved stage has Params that {type(instance).__name__} does not have: "
            f"{unknown!r:.200}"
        )
    instance._resetUid(metadata["uid"])
    try:
        instance._set(**given)
        instance._setDefault(**defaults)
    except SparkDLError:
        raise
    except Exception as error:  # pyspark's converters may raise anything
        raise ConfigError(f"the saved stage has a Param with an invalid value: {error}") from error
    return instance
