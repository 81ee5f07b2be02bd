"""``NearDuplicatesModel``: the rows that stay, of the table it was fitted to and of new ones.

Estimator and model are saved in pyspark.ml's layout:

metadata/part-00000   the Params
found.json            what a fit found; only the model's
hashes.parquet        the different hashes, and which thresholds drop each; only the model's
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from typing_extensions import Self

from sparkdl.arguments import counted
from sparkdl.checkpoint.module_files import read_json_object
from sparkdl.dedup.columns import DISTANCE, DUPLICATE_OF, require_columns
from sparkdl.dedup.hashing import hashes, persisted
from sparkdl.dedup.pairs import conflicting, nearest
from sparkdl.dedup.params import DedupParams
from sparkdl.dedup.report import SHOWN, DuplicateReport, collected, examples, values_of
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.persistence import DirectoryWriter, StageReader
from sparkdl.spark.catalyst.versions import frame_of, table_of
from sparkdl.spark.required import jvm_named, require_frame, require_session
from sparkdl.spark.rows.columns import quoted

FOUND, HASHES = "found.json", "hashes.parquet"
COLUMNS = ["group", "word", "first", "rows", "dropped"]
_ROW = "_sparkdl_row"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a fit found.

    Attributes:
        threshold: the largest that the model knows.
        hash: which one it used.
        grouped: whether it had a column ``within``.
        rows: all rows.
        different: hashes, by the value of ``within``.
        broken: rows whose value could not be hashed.
        first_broken: which of them has the smallest ``keep``, and what is wrong with it.
        null: rows whose value is null.
        blank: images of a single grey value, which no hash tells apart.
    """

    threshold: int
    hash: str
    grouped: bool
    rows: int
    different: int
    broken: int
    first_broken: str
    null: int
    blank: int = 0


class NearDuplicatesModel(DedupParams, Model, MLWritable, MLReadable["NearDuplicatesModel"]):
    """Leaves out the rows that are near one that stays. Made by ``NearDuplicates.fit``.

    Attributes:
        words: the different hashes: columns ``group`` (the value of ``within``), ``word`` (the
            hash), ``first`` (the smallest ``keep`` of its rows), ``rows`` (how many have it) and
            ``dropped`` (a long whose bit t is 1 if threshold t drops them). After ``fit`` it is
            persisted until ``model.words.unpersist()``; Spark computes it anew if it is needed.
        found: what the fit found, among it the number of broken rows.
    """

    def __init__(self, words: DataFrame, found: Found) -> None:
        super().__init__()
        self._set_declared_defaults()
        self.words = words
        self._dataset: DataFrame | None = None
        self.found = found

    def write(self) -> DirectoryWriter:
        """A writer: ``model.write().overwrite().save(path)``; the driver holds the hashes then."""
        return DirectoryWriter(self, self._write_found)

    def _write_found(self, directory: Path) -> None:
        (directory / FOUND).write_text(json.dumps(asdict(self.found), indent=2))
        pq.write_table(table_of(self.words.select(*COLUMNS)), directory / HASHES)

    @classmethod
    def read(cls) -> StageReader:
        """A reader, which ``load`` uses; it raises ConfigError for what is damaged."""
        return StageReader(cls, cls._saved)

    @classmethod
    def _saved(cls, directory: Path, metadata: dict[str, Any]) -> Self:
        spark, saved = require_session(), read_json_object(directory / FOUND)
        try:
            words = pq.read_table(directory / HASHES)
            if words.column_names != COLUMNS:
                raise ValueError(f"its hashes have the columns {words.column_names!r:.200}")
            return cls(frame_of(spark, words), Found(**saved))
        except (LookupError, TypeError, ValueError, OSError, pa.ArrowException) as error:
            raise ConfigError(f"the model in {directory} is damaged: {error}") from error

    def kept(self) -> DataFrame:
        """The different hashes that stay: columns ``group``, ``word``, ``first`` and ``rows``."""
        self._require_fitted()
        stays = f"dropped & {1 << self.getThreshold()}L = 0"
        return self.words.where(stays).drop("dropped")

    def duplicates(self, dataset: DataFrame) -> DataFrame:
        """The rows of a table that are near one that stays.

        Returns:
            Three columns: that of ``keep``, ``duplicate_of`` (the ``keep`` of the nearest row that
            stays, the first of several) and ``distance``.

        Raises:
            ConfigError: the model was fitted with another ``hash``, or a smaller threshold.
            DataError: a column is missing, of another type than it was, or there already.
        """
        self._require_fitted()
        require_frame(dataset)
        if dataset.isStreaming:
            raise DataError(
                "the DataFrame is a stream. Transform the batches that foreachBatch hands out"
            )
        keep, kept, types = self.getKeep(), self.kept(), require_columns(self, dataset)
        for param, name, kind in zip(("keep", "within"), ("first", "group"), types, strict=True):
            known = kept.schema[name].dataType
            if kind is not None and kind != known:
                raise DataError(
                    f"column '{getattr(self, f'get{param.capitalize()}')()}' ({param}) has type "
                    f"{kind.simpleString()}, but it had {known.simpleString()} in the table that "
                    "the model was fitted to. Cast it"
                )
        rows = hashes(dataset, self.getHash(), self.getInputCol(), self.getWithin(), keep)
        rows = _once_each(rows, keep).where("word is not null")
        near = nearest(rows, kept, self.getThreshold())
        if self._dataset is not None and (
            dataset is self._dataset or dataset.sameSemantics(self._dataset)
        ):
            near = _of_same_ids(near, keep)
        return near.where("not (distance = 0 and kept = first)").select(
            F.col("first").alias(keep),
            F.col("kept").alias(DUPLICATE_OF),
            F.col("distance").alias(DISTANCE),
        )

    def conflicts(self) -> DataFrame:
        """Near rows whose labels (values of ``within``) differ: one of the two may be wrong.

        Of rows with one hash and label, the first stands for all.

        Returns:
            Columns ``row``, ``label``, ``other``, ``other_label`` and ``distance``.
        """
        self._require_fitted()
        if self.getWithin() is None:
            raise ConfigError("without a column 'within', rows have no labels that could differ")
        return conflicting(self.words, self.getThreshold())

    @jvm_named()
    def report(self, dataset: DataFrame | None = None) -> DuplicateReport:
        """Say how many rows each threshold keeps, with pairs to look at and label errors.

        Args:
            dataset: the rows that the model was fitted to; a model that was loaded needs them.

        Raises:
            ConfigError: the rows are not known.
        """
        dataset = self._rows(dataset)
        found, keep = self.found, self.getKeep()
        fitted = range(self.getThreshold() + 1)
        stay = [F.count_if(F.expr(f"dropped & {1 << t}L = 0")).alias(str(t)) for t in fitted]
        counts = self.words.agg(*stay).first() or ()
        rows = [count + found.broken + found.null for count in counts]
        kept = pd.DataFrame({"threshold": fitted, "rows": rows})
        kept["share"] = kept["rows"] / found.rows
        pairs = examples(self.duplicates(dataset), keep)
        labelled = self.words if self.getWithin() is not None else self.words.limit(0)
        every = conflicting(labelled, self.getThreshold())
        with persisted(pairs, every):
            number = every.count()
            conflicts = every.orderBy("distance", "row", "other").limit(SHOWN)
            of_pairs = pairs.select("row").union(pairs.select(DUPLICATE_OF))
            ids = of_pairs.union(conflicts.select("row")).union(conflicts.select("other"))
            values = values_of(dataset, self.getHash(), self.getInputCol(), keep, ids)
            shown = collected(pairs), collected(conflicts)
        return DuplicateReport(self._summary(), kept, *shown, number, values)

    def _summary(self) -> str:
        found = self.found
        told = f"{counted(found.rows, 'row')} with {counted(found.different, 'different hash')}"
        if found.null:
            told += f"; {counted(found.null, 'null value')}, kept"
        if found.broken:
            told += f"; {counted(found.broken, 'broken row')}, kept, first {found.first_broken}"
        if found.blank:
            told += f"; {counted(found.blank, 'image')} of a single grey value, all alike to a hash"
        return f"{told}."

    def _rows(self, dataset: DataFrame | None) -> DataFrame:
        known = self._dataset if dataset is None else dataset
        if known is None:
            raise ConfigError(
                "a model that was loaded does not know its rows: call report(df) with those that "
                "it was fitted to"
            )
        require_frame(known, "dataset")
        return known

    @jvm_named()
    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Called by ``transform``: the rows that stay, or all of them, marked."""
        found = self.duplicates(dataset)
        marked = self.getMode() == "mark"
        for name in (DUPLICATE_OF, DISTANCE) if marked else ():
            if name.lower() in (each.lower() for each in dataset.columns):
                raise DataError(
                    f"the DataFrame already has a column '{name}'. Drop or rename it, or set "
                    "mode='filter'"
                )
        found = found.withColumnRenamed(self.getKeep(), _ROW)
        same = quoted(self.getKeep()) == F.col(_ROW)
        return dataset.join(found, same, "left" if marked else "left_anti").drop(_ROW)

    def _require_fitted(self) -> None:
        """Raise ConfigError if the model was fitted otherwise than its Params say."""
        found, kind, threshold = self.found, self.getHash(), self.getThreshold()
        if kind != found.hash or threshold > found.threshold:
            raise ConfigError(
                f"the model was fitted with hash='{found.hash}' and threshold={found.threshold}, "
                f"but now has hash='{kind}' and threshold={threshold}. Fit again; without it only "
                "a smaller threshold is possible"
            )
        if (self.getWithin() is not None) != found.grouped:
            raise ConfigError(
                f"the model was fitted {'with' if found.grouped else 'without'} a column 'within', "
                f"but now has within={self.getWithin()!r}. Fit again"
            )


def _once_each(rows: DataFrame, keep: str) -> DataFrame:
    """The same rows; if two have one ``first``, or one has none, the query fails."""
    said = f"column '{keep}' (keep) must be unique and without null, but is not: "
    value = F.concat(F.lit(said), F.coalesce(F.col("first").cast("string"), F.lit("null")))
    once = rows.groupBy("first").agg(
        F.count("*").alias("times"), F.first("group").alias("group"), F.first("word").alias("word")
    )
    wrong = (F.col("times") > 1) | F.col("first").isNull()
    checked = F.when(wrong, F.raise_error(value).cast("long")).otherwise(F.col("word"))
    return once.select("first", "group", checked.alias("word"))


def _of_same_ids(near: DataFrame, keep: str) -> DataFrame:
    """The same rows; if those of one hash no longer have the ids of the fit, the query fails.

    Otherwise no row might stay: each would be a duplicate of one that is not there.
    """
    said = F.concat(
        F.lit(f"column '{keep}' (keep) has other values than in fit: of the rows with one hash, "),
        F.lit("the first had "),
        F.col("kept").cast("string"),
        F.lit(" and now has "),
        F.col("least").cast("string"),
        F.lit(". Ids that are computed anew at each reading (monotonically_increasing_id) must "),
        F.lit("be saved with the rows before fit"),
    )
    same = (F.col("distance") > 0) | F.col("kept").eqNullSafe(F.col("least"))
    checked = F.when(same, F.col("distance")).otherwise(F.raise_error(said).cast("int"))
    return near.withColumn("distance", checked)
