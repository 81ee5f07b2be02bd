"""Where a job's rows come from: files, a table, a query, or the user's own code."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark.required import require_frame


class Source(abc.ABC):
    """Reads, or computes, a job's rows; subclasses are named in the configuration."""

    @abc.abstractmethod
    def read(self, spark: SparkSession) -> DataFrame:
        """The rows; the same ones each time, or an interrupted training starts over.

        Args:
            spark: the job's session.
        """


@dataclass
class Files(Source):
    """Files of any format that Spark reads.

    Args:
        path: one path or several, as Spark takes them.
        format: ``parquet``, ``csv``, ``json``, ``orc`` or another that Spark has a reader for.
        options: of the reader, for example ``{header: "true"}``.
        schema: columns and types as in SQL, ``id bigint, x array<float>``; by default the files'
            own.
    """

    path: str | list[str]
    format: str = "parquet"
    options: dict[str, str] | None = None
    schema: str | None = None

    def read(self, spark: SparkSession) -> DataFrame:
        """Called by the job."""
        reader = spark.read.format(self.format).options(**(self.options or {}))
        if self.schema is not None:
            reader = reader.schema(self.schema)
        return reader.load(self.path)


@dataclass
class Table(Source):
    """A table of the session's catalog.

    Args:
        name: ``table``, ``schema.table`` or ``catalog.schema.table``.
    """

    name: str

    def read(self, spark: SparkSession) -> DataFrame:
        """Called by the job."""
        return spark.read.table(self.name)


@dataclass
class Query(Source):
    """What a query returns.

    Args:
        sql: the query.
    """

    sql: str

    def read(self, spark: SparkSession) -> DataFrame:
        """Called by the job."""
        return spark.sql(self.sql)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows a job reads, and which of them it uses for what.

    Args:
        select: SQL expressions, one per column, for example ``["*", "log(1 + amount) as amount"]``;
            all columns by default.
        train: SQL condition on the rows to learn from; all by default.
        test: SQL condition on the rows to evaluate on; evaluate.py takes all by default.
        predict: SQL condition on the rows to predict; all by default.
        persist: whether executors keep the rows during the job, for sources that take longer to
            compute than to read again.
    """

    select: list[str] | None = None
    train: str | None = None
    test: str | None = None
    predict: str | None = None
    persist: bool = False

    @contextmanager
    def read(self, source: Source, spark: SparkSession) -> Iterator[DataFrame]:
        """All rows, with the requested columns; kept by executors within the context at most."""
        rows = source.read(spark)
        require_frame(rows, f"what {type(source).__name__}.read returns")
        if self.select is not None:
            rows = rows.selectExpr(*self.select)
        try:
            yield rows.persist() if self.persist else rows
        finally:
            rows.unpersist()

    @staticmethod
    def where(rows: DataFrame, condition: str | None) -> DataFrame:
        """The rows for which a condition holds."""
        return rows if condition is None else rows.where(condition)


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How predictions are written.

    Args:
        format: ``parquet``, ``orc``, ``json``, ``csv`` or another that Spark has a writer for.
        columns: those of the predictions' table; all by default.
        partition_by: columns that become folders.
        options: of the writer, for example ``{compression: zstd}``.
        files: how many files to write at most, to each folder; as many as there are partitions by
            default.
    """

    format: str = "parquet"
    columns: list[str] | None = None
    partition_by: list[str] | None = None
    options: dict[str, str] | None = None
    files: int | None = None

    def __post_init__(self) -> None:
        if self.files is not None and self.files < 1:
            raise ConfigError(f"write.files must be at least 1, got {self.files}")
        if self.columns is not None and not self.columns:
            raise ConfigError("write.columns names no column; leave it out for all of them")
