"""Which columns workers read from Parquet files themselves, as the JVM would take far longer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.encodings import VECTOR
from sparkdl.feed.record_batches.parquet_rows import KINDS, PATH, ROW, FileColumn, name_of_columns
from sparkdl.spark.rows.parquet_settings import read_as_usual

_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
"""Exactly this class; formats built on it, such as Delta's, may interpret a file differently."""
_ROW_BY_ROW = {"Project", "Filter", "SubqueryAlias"}
"""Nodes of a logical plan that keep the order of a file's rows."""
_METADATA = "_metadata"


def columns_in_files(frame: DataFrame, names: Mapping[str, str]) -> dict[str, FileColumn]:
    """Which columns can be read straight from files.

    These are columns of arrays, vectors or bytes in a DataFrame that is read from Parquet files,
    and at most filtered or coalesced, on a file system mounted on the executors (``file:``). A
    column computed by any expression does not qualify, nor any of a table whose fields, options or
    settings may tell Spark to show something else than what the file has under that name.

    Args:
        frame: any DataFrame.
        names: the names of its columns, by the names under which they are to arrive.
    """
    wide = {
        name: kind
        for name, column in names.items()
        if (kind := _wide(frame.schema[column].dataType)) is not None
    }
    if not wide:
        return {}
    execution = frame._jdf.queryExecution()
    plan = execution.analyzed()
    relation = _scan_of(plan)
    if relation is None or not _is_plain(relation.relation()):
        return {}
    if not read_as_usual(relation.relation(), frame.sparkSession):
        return {}
    if _scan_of(execution.withCachedData()) is None:
        return {}  # cached rows stay as they were, whatever happens to the files
    optimized = _scan_of(execution.optimizedPlan())
    if optimized is None:
        return {}
    kept = {each.exprId().id() for each in _items(optimized.output())}
    if _METADATA not in {each.name() for each in _items(plan.metadataOutput())}:
        return {}  # a view hides it, or the user has a column of that name
    partitioned = {each.lower() for each in relation.relation().partitionSchema().fieldNames()}
    of_files = {
        each.exprId().id(): each.name()
        for each in _items(relation.output())
        if each.exprId().id() in kept and each.name().lower() not in partitioned
    }
    fields = {
        each.name(): of_files[each.exprId().id()]
        for each in _items(plan.output())
        if each.exprId().id() in of_files
    }
    exactly = str(frame.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    return {
        name: FileColumn(fields[names[name]], kind, dimensions, exactly)
        for name, (kind, dimensions) in wide.items()
        if names[name] in fields
    }


def places(frame: DataFrame, columns: Mapping[str, FileColumn]) -> tuple[str, Column]:
    """Where the rows lie, as ``feed.record_batches.parquet_rows`` reads it: a column, and its name.

    Args:
        frame: as given to ``columns_in_files``.
        columns: what that returned, at least one.
    """
    metadata = frame.metadataColumn(_METADATA)
    return name_of_columns(columns), F.struct(
        metadata["file_path"].alias(PATH), metadata["row_index"].alias(ROW)
    )


def _wide(kind: T.DataType) -> tuple[str, int] | None:
    """What a column holds and in how many arrays; None if Spark itself reads it as fast."""
    if isinstance(kind, VectorUDT):
        return VECTOR.name, 0
    dimensions = 0
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
        dimensions += 1
    if dimensions == 0 and not isinstance(kind, T.BinaryType):
        return None
    element = kind.simpleString()
    return (element, dimensions) if element in KINDS else None


def _scan_of(plan: Any) -> Any:
    """The relation that a plan reads, if it only reads and filters it; else None."""
    while (name := plan.getClass().getSimpleName()) in _ROW_BY_ROW or _coalesces(plan, name):
        plan = plan.children().apply(0)
    return plan if name == "LogicalRelation" and not plan.isStreaming() else None


def _coalesces(plan: Any, name: str) -> bool:
    """Whether a node concatenates whole partitions, each with its rows in their order."""
    return name == "Repartition" and not plan.shuffle()


def _is_plain(relation: Any) -> bool:
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        return False
    if relation.fileFormat().getClass().getName() != _PARQUET:
        return False
    # The partitions of a catalog's index may lie anywhere, whatever its root is.
    location = relation.location()
    if location.getClass().getSimpleName() != "InMemoryFileIndex":
        return False
    return {path.toUri().getScheme() for path in _items(location.rootPaths())} == {"file"}


def _items(sequence: Any) -> Iterable[Any]:
    return (sequence.apply(index) for index in range(sequence.size()))
