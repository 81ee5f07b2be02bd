"""Whether anything tells Spark to show something else than what is in a Parquet file.

Spark takes many decisions about a file from the table, from the options of the reader and from
settings. What is not known here to leave columns of arrays, vectors and bytes alone is taken for
something that changes them.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import SparkSession

FAMILIES = ("spark.sql.files.", "spark.sql.parquet.", "spark.sql.legacy.parquet.", "parquet.")
"""The beginnings of the names of settings by which files are read; the last are Hadoop's."""

AT_DEFAULT = {
    "spark.sql.files.archive.reader.enabled": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.legacy.parquet.nanosAsLong": "false",
    "spark.sql.parquet.reader.respectUnknownTypeAnnotation.enabled": "false",
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


def read_as_usual(relation: Any, spark: SparkSession) -> bool:
    """Whether Spark shows arrays, vectors and bytes as the file has them under a column's name.

    Args:
        relation: Spark's ``HadoopFsRelation`` of Parquet files.
        spark: the session that reads it.
    """
    options = relation.options().keys().iterator()
    while options.hasNext():
        if options.next().lower() not in OPTIONS:
            return False
    # Spark's own settings are in there too, as far as they are set.
    settings = spark._jsparkSession.sessionState().newHadoopConf()
    for family in FAMILIES:
        for name, value in settings.getPropsWithPrefix(family).items():
            if not leaves_alone(family + name, value):
                return False
    return describes_only(json.loads(relation.schema().json()))


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
