"""Which columns workers read from files themselves, as the JVM would take far longer.

They are those of arrays, vectors and bytes in Parquet files, and the content of whole files
(``binaryFile``). Spark takes many decisions about a file from the table, from the options of the
reader and from settings. What is not known here to leave such columns alone is taken for something
that changes them. Only files on a file system that the executors have mounted (``file:``) are read
so; those of object stores and of HDFS are read by Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.encodings import VECTOR
from sparkdl.feed.record_batches.parquet_rows import (
    KINDS,
    PATH,
    ROW,
    WHOLE,
    FileColumn,
    name_of_columns,
)
from sparkdl.spark.catalyst.file_scan import METADATA, FileScan, file_scan
from sparkdl.spark.catalyst.versions import metadata_of

FAMILIES = (
    "spark.sql.files.",
    "spark.sql.parquet.",
    "spark.sql.legacy.parquet.",
    "spark.sql.sources.binaryFile.",
    "parquet.",
)
"""The beginnings of the names of settings by which files are read; the last are Hadoop's."""

AT_DEFAULT = {
    "spark.sql.files.archive.reader.enabled": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.legacy.parquet.nanosAsLong": "false",
    "spark.sql.parquet.reader.respectUnknownTypeAnnotation.enabled": "false",
    "spark.sql.sources.binaryFile.maxLength": "2147483647",
}
"""The only value of a setting with which Spark shows what is in the file."""

WITHOUT_EFFECT = frozenset(
    {
        *(  # which files there are and how they are split, which the rows' places tell
            f"spark.sql.files.{name}"
            for name in (
                "ignoreInvalidPartitionPaths",
                "ignoredPathSegmentRegex",
                "maxPartitionBytes",
                "maxPartitionNum",
                "maxRecordsPerFile",
                "minPartitionNum",
                "openCostInBytes",
                "supportSecondOffsetFormat",
            )
        ),
        *(
            f"spark.sql.parquet.{name}"
            for name in (
                # which rows are looked at: filters run again on what was read
                "aggregatePushdown",
                "filterPushdown",
                "filterPushdown.date",
                "filterPushdown.decimal",
                "filterPushdown.string.startsWith",
                "filterPushdown.stringPredicate",
                "filterPushdown.timestamp",
                "pushdown.inFilterThreshold",
                "recordLevelFilter.enabled",
                # how fast they are read
                "columnarReaderBatchSize",
                "enableNestedColumnVectorizedReader",
                "enableNullTypeVectorizedReader",
                "enableVectorizedReader",
                # the table's schema, which is looked at, ids included
                "binaryAsString",
                "fieldId.read.enabled",
                "fieldId.read.ignoreMissing",
                "mergeSchema",
                "respectSummaryFiles",
                # other types
                "datetimeRebaseModeInRead",
                "ignoreVariantAnnotation",
                "inferTimestampNTZ.enabled",
                "int96AsTimestamp",
                "int96RebaseModeInRead",
                "int96TimestampConversion",
                # writing
                "compression.codec",
                "datetimeRebaseModeInWrite",
                "fieldId.write.enabled",
                "int96RebaseModeInWrite",
                "output.committer.class",
                "outputTimestampType",
                "variant.annotateLogicalType.enabled",
                "writeLegacyFormat",
            )
        ),
        # structs of which a file has no field, which are refused
        "spark.sql.legacy.parquet.returnNullStructIfAllFieldsMissing",
        *(  # writing
            f"parquet.{name}"
            for name in (
                "block.size",
                "compression",
                "dictionary.page.size",
                "enable.dictionary",
                "enable.summary-metadata",
                "page.size",
                "summary.metadata.level",
                "writer.version",
            )
        ),
    }
)
"""Settings that leave these columns alone, whatever their value."""

OPTIONS = frozenset(
    {
        "basepath",
        "compression",
        "datetimerebasemode",
        "int96rebasemode",
        "mergeschema",
        "modifiedafter",
        "modifiedbefore",
        "path",
        "pathglobfilter",
        "paths",
        "recursivefilelookup",
        "timezone",
    }
)
"""A reader's options, in lower case, that leave these columns alone, whatever their value."""

DESCRIPTIONS = frozenset({"comment", "ml_attr"})
"""Keys in a field's metadata that only describe it; ``parquet.field.id`` and ``EXISTS_DEFAULT``,
for example, say what Spark reads instead of the file's column of that name."""


def columns_in_files(frame: DataFrame, names: Mapping[str, str]) -> dict[str, FileColumn]:
    """Which columns can be read straight from files.

    These are columns of arrays, vectors or bytes in a DataFrame that is read from Parquet files, or
    of whole files (``binaryFile``), and at most filtered or coalesced, on a file system mounted on
    the executors (``file:``). A column computed by any expression does not qualify, nor any of a
    table whose fields, options or settings may tell Spark to show something else than what the file
    has under that name.

    Args:
        frame: any DataFrame.
        names: the names of its columns, by the names under which they are to arrive.
    """
    wide = {
        name: kind
        for name, column in names.items()
        if (kind := _wide(frame.schema[column].dataType)) is not None
    }
    scan = file_scan(frame, FAMILIES) if wide else None
    if scan is None or not _read_as_usual(scan):
        return {}
    exactly = str(frame.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    return {
        name: FileColumn(
            scan.columns[names[name]], WHOLE if scan.whole else kind, dimensions, exactly
        )
        for name, (kind, dimensions) in wide.items()
        if names[name] in scan.columns
    }


def places(frame: DataFrame, columns: Mapping[str, FileColumn]) -> tuple[str, Column]:
    """Where the rows lie, as ``feed.record_batches.parquet_rows`` reads it: a column, and its name.

    Args:
        frame: as given to ``columns_in_files``.
        columns: what that returned, at least one.
    """
    metadata = metadata_of(frame, METADATA)
    where = [metadata["file_path"].alias(PATH)]
    if any(each.kind != WHOLE for each in columns.values()):
        where.append(metadata["row_index"].alias(ROW))
    return name_of_columns(columns), F.struct(*where)


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


def _read_as_usual(scan: FileScan) -> bool:
    """Whether Spark shows arrays, vectors and bytes as the files have them, by their names."""
    return (
        scan.options <= OPTIONS
        and all(leaves_alone(name, value) for name, value in scan.settings.items())
        and describes_only(scan.schema)
    )


def leaves_alone(setting: str, value: str) -> bool:
    """Whether a setting of one of the families, with this value, has no effect on the columns."""
    return setting in WITHOUT_EFFECT or AT_DEFAULT.get(setting) == value.strip().lower()


def describes_only(schema: Any) -> bool:
    """Whether the metadata of all fields, however deeply nested, only describe them.

    Args:
        schema: a type as Spark writes it in JSON.
    """
    if isinstance(schema, list):
        return all(map(describes_only, schema))
    if not isinstance(schema, dict):
        return True
    return set(schema.get("metadata", {})) <= DESCRIPTIONS and all(
        describes_only(value) for key, value in schema.items() if key != "metadata"
    )
