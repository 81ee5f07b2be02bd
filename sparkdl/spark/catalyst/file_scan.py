"""What a DataFrame that only reads and filters files takes from them, and how."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.spark.catalyst.jvm import with_fallback

_FORMATS = {
    "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat": False,
    "org.apache.spark.sql.execution.datasources.binaryfile.BinaryFileFormat": True,
}
"""Whether a row is a whole file, by format. Exactly these classes; formats built on them, such as
Delta's, may interpret a file differently."""
_ROW_BY_ROW = {"Project", "Filter", "SubqueryAlias"}
"""Nodes of a logical plan that keep the order of a file's rows."""
METADATA = "_metadata"


@dataclass(frozen=True)
class FileScan:
    """Files that are read row by row.

    Attributes:
        whole: whether a row is a whole file (``binaryFile``), and not one of Parquet's.
        columns: the files' columns, by the names that the DataFrame has for them.
        options: the names of the reader's options, in lower case.
        settings: Spark's and Hadoop's settings of the families that were asked for.
        schema: the table's, as Spark writes it in JSON.
    """

    whole: bool
    columns: Mapping[str, str]
    options: frozenset[str]
    settings: Mapping[str, str]
    schema: Any


# Otherwise Spark reads the columns itself, which takes longer and shows the same.
@with_fallback(lambda frame, families: None)
def file_scan(frame: DataFrame, families: Sequence[str]) -> FileScan | None:
    """The files that a DataFrame reads and at most filters or coalesces; None for any other.

    They are on a file system mounted on the executors (``file:``), and can be asked for their rows'
    places (``_metadata``).

    Args:
        frame: any DataFrame.
        families: the beginnings of the names of settings that matter.
    """
    execution = frame._jdf.queryExecution()
    plan = execution.analyzed()
    scan = _scan_of(plan)
    if scan is None or not _is_plain(scan.relation()):
        return None
    if _scan_of(execution.withCachedData()) is None:
        return None  # cached rows stay as they were, whatever happens to the files
    optimized = _scan_of(execution.optimizedPlan())
    if optimized is None:
        return None
    if METADATA not in {each.name() for each in _items(plan.metadataOutput())}:
        return None  # a view hides it, or the user has a column of that name
    kept = {each.exprId().id() for each in _items(optimized.output())}
    relation = scan.relation()
    partitioned = {each.lower() for each in relation.partitionSchema().fieldNames()}
    of_files = {
        each.exprId().id(): each.name()
        for each in _items(scan.output())
        if each.exprId().id() in kept and each.name().lower() not in partitioned
    }
    # Spark's own settings are in there too, as far as they are set.
    hadoop = frame.sparkSession._jsparkSession.sessionState().newHadoopConf()
    return FileScan(
        whole=_FORMATS[_format(relation)],
        columns={
            each.name(): of_files[each.exprId().id()]
            for each in _items(plan.output())
            if each.exprId().id() in of_files
        },
        options=frozenset(each.lower() for each in _iterated(relation.options().keys())),
        settings={
            family + name: value
            for family in families
            for name, value in hadoop.getPropsWithPrefix(family).items()
        },
        schema=json.loads(relation.schema().json()),
    )


def _scan_of(plan: Any) -> Any:
    """The relation that a plan reads, if it only reads and filters it; else None."""
    while (name := plan.getClass().getSimpleName()) in _ROW_BY_ROW or _coalesces(plan, name):
        plan = plan.children().apply(0)
    return plan if name == "LogicalRelation" and not plan.isStreaming() else None


def _coalesces(plan: Any, name: str) -> bool:
    """Whether a node concatenates whole partitions, each with its rows in their order."""
    return name == "Repartition" and not plan.shuffle()


def _format(relation: Any) -> str:
    return str(relation.fileFormat().getClass().getName())


def _is_plain(relation: Any) -> bool:
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        return False
    if _format(relation) not in _FORMATS:
        return False
    # The partitions of a catalog's index may lie anywhere, whatever its root is.
    location = relation.location()
    if location.getClass().getSimpleName() != "InMemoryFileIndex":
        return False
    return {path.toUri().getScheme() for path in _items(location.rootPaths())} == {"file"}


def _items(sequence: Any) -> Iterable[Any]:
    return (sequence.apply(index) for index in range(sequence.size()))


def _iterated(collection: Any) -> Iterator[Any]:
    iterator = collection.iterator()
    while iterator.hasNext():
        yield iterator.next()
