"""``NearDuplicates``: find rows that are all but equal, and keep one of them."""

from __future__ import annotations

import logging
import math
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.arguments import counted
from sparkdl.dedup.columns import require_columns
from sparkdl.dedup.hashing import hashes, imagehash, persisted
from sparkdl.dedup.model import Found, NearDuplicatesModel
from sparkdl.dedup.pairs import decided
from sparkdl.dedup.params import DedupParams
from sparkdl.encodings.images import pillow
from sparkdl.errors import DataError
from sparkdl.estimator.params.declaration import constructor
from sparkdl.estimator.persistence import DirectoryWriter, StageReader
from sparkdl.spark.required import jvm_named, require_frame
from sparkdl.spark.rows.packing import small_record_batches

logger = logging.getLogger(__name__)

ROWS_A_TASK = 20_000
"""Few enough that tasks take seconds."""


@constructor()
class NearDuplicates(
    DedupParams, Estimator[NearDuplicatesModel], MLWritable, MLReadable["NearDuplicates"]
):
    """Finds rows whose images or texts are all but equal, and keeps the first of them.

    Rows are near if the 64-bit hashes of their images or texts differ in at most ``threshold``
    bits; all such pairs are found. In the order of ``keep``, each row stays that is near no row
    that stays before it. Of three rows where only neighbours are near, the first and the third
    stay. A row that has no hash (null, or no valid image) stays too, and is counted.

    Every argument is a pyspark.ml Param with a getter and a setter. They come in groups:

    Raises:
        ConfigError: an argument is unknown or out of range.

    Source: Li, Chang, Liu and McGill, CE-Dedup.
    """

    def write(self) -> DirectoryWriter:
        """A writer: ``estimator.write().overwrite().save(path)``."""
        return DirectoryWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        """A reader, which ``load`` uses; it raises ConfigError for what is damaged."""
        return StageReader(cls, lambda *_: cls())

    @jvm_named()
    def _fit(self, dataset: DataFrame) -> NearDuplicatesModel:
        """Called by ``fit``: hash every row, and find the pairs."""
        require_frame(dataset, to_end="Fit on")
        require_columns(self, dataset)
        kind = self.getHash()
        if kind not in ("simhash", "given"):
            pillow()
            imagehash()
        with small_record_batches(dataset.sparkSession):
            rows = hashes(dataset, kind, self.getInputCol(), self.getWithin(), self.getKeep())
            with persisted(rows):
                counts = self._counted(rows)
                tasks = math.ceil(counts["rows"] / ROWS_A_TASK)
                words = decided(rows.where("word is not null"), tasks, self.getThreshold())
                words.persist()
                try:
                    different = words.count()  # computed now, while the hashes are there
                except BaseException:
                    words.unpersist()
                    raise
        found = Found(
            threshold=self.getThreshold(),
            hash=kind,
            grouped=self.getWithin() is not None,
            different=different,
            **counts,
        )
        model = NearDuplicatesModel(words, found)
        model._dataset = dataset
        return self._copyValues(model)

    def _counted(self, rows: DataFrame) -> dict[str, Any]:
        """Count the rows, and those without a hash.

        Raises:
            DataError: there are no rows, or ``keep`` is not unique, or has a null.
        """
        keep = self.getKeep()
        found = rows.agg(
            F.count("*").alias("rows"),
            F.count("word").alias("hashed"),
            F.count("fault").alias("broken"),
            F.count_if("blank").alias("blank"),
            F.count("first").alias("named"),
            F.count_distinct("first").alias("different"),
            F.min_by(
                F.struct("first", "fault"), F.when(F.col("fault").isNotNull(), F.col("first"))
            ).alias("first_broken"),
        ).first()
        assert found is not None
        if not found.rows:
            raise DataError("the DataFrame has no rows")
        if found.different < found.rows:  # Spark leaves out null
            null, twice = found.rows - found.named, found.named - found.different
            raise DataError(
                f"column '{keep}' (keep) must be unique and without null, but of "
                f"{counted(found.rows, 'row')} {null} have null and {twice} the value of another "
                "one. Make a column that is, for example with F.monotonically_increasing_id(), and "
                "save the rows with it"
            )
        example = ""
        if found.broken:
            row, fault = found.first_broken
            example = f"that with {keep}={row!r}: {fault}"
            logger.warning(
                "of %s, %d have nothing to compare, and stay; the first is %s",
                counted(found.rows, "row"),
                found.broken,
                example,
            )
        return {
            "rows": found.rows,
            "broken": found.broken,
            "first_broken": example,
            "null": found.rows - found.hashed - found.broken,
            "blank": found.blank,
        }
