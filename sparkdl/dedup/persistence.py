"""Saving and loading of the estimator and the model, in pyspark.ml's layout.

metadata/part-00000   the Params
found.json            what a fit found; only the model's
hashes.parquet        the different hashes, and which thresholds drop each; only the model's
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.ml.util import MLReader

from sparkdl.estimator.persistence import DirectoryWriter, read_metadata, restore_params
from sparkdl.spark.catalyst.versions import table_of
from sparkdl.spark.storage.files import fetch

FOUND, HASHES = "found.json", "hashes.parquet"
COLUMNS = ["group", "word", "first", "rows", "dropped"]


class PlainWriter(DirectoryWriter):
    """Writes the estimator, whose Params are all JSON."""

    def _write_files(self, directory: Path, objects: dict[str, Any]) -> None:
        """Nothing but the metadata."""


class ModelWriter(DirectoryWriter):
    """Writes the model; the driver holds its different hashes meanwhile."""

    def _write_files(self, directory: Path, objects: dict[str, Any]) -> None:
        model: Any = self.instance
        saved = {"found": asdict(model.found), "keys": asdict(model.keys)}
        (directory / FOUND).write_text(json.dumps(saved, indent=2))
        pq.write_table(table_of(model.words.select(*COLUMNS)), directory / HASHES)


class StageReader(MLReader[Any]):
    """Reads a stage, which ``make`` builds of its directory, without its Params."""

    def __init__(self, make: Callable[[Path], Any]) -> None:
        super().__init__()
        self._make = make

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows."""
        with fetch(path) as directory:
            metadata = read_metadata(directory)
            return restore_params(self._make(directory), metadata)
