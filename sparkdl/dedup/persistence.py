"""Saving and loading of the estimator and the model, in pyspark.ml's layout.

metadata/part-00000   the Params
found.json            what a fit found; only the model's
hashes.parquet        the different hashes, and which thresholds drop each; only the model's
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml.util import MLReader

from sparkdl.checkpoint.module_files import read_json_object
from sparkdl.dedup.pairs import Keys
from sparkdl.errors import ConfigError
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


class PlainReader(MLReader[Any]):
    """Reads the estimator."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows."""
        with fetch(path) as directory:
            return restore_params(self._kind(), read_metadata(directory))


class ModelReader(MLReader[Any]):
    """Reads the model; ``make`` builds it of the hashes, the keys and what a fit found."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def load(self, path: str) -> Any:
        """Load from a path on any file system that Spark knows."""
        with fetch(path) as directory:
            metadata = read_metadata(directory)
            saved = read_json_object(directory / FOUND)
            try:
                keys = Keys(**{**saved["keys"], "bands": tuple(saved["keys"]["bands"])})
                table = pq.read_table(directory / HASHES)
                model = self._make(table, keys, saved["found"])
            except (LookupError, TypeError, ValueError, OSError, pa.ArrowException) as error:
                raise ConfigError(f"the model in {path} is damaged: {error}") from error
            return restore_params(model, metadata)
