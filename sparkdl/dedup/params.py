"""The Params of the search for near-duplicates."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param

from sparkdl.arguments import require_whole
from sparkdl.dedup.hashing import HASHES
from sparkdl.errors import ConfigError
from sparkdl.estimator.params.declaration import Declaration, DeclaredParams, choice
from sparkdl.spark.rows.converters import nonempty_text, optional

LARGEST = 31
"""Of the thresholds: unrelated words differ in 32 bits on average."""


def _threshold(value: Any) -> int:
    number = require_whole("threshold", value, 0, "bits")
    if number > LARGEST:
        raise ConfigError(
            f"threshold must be at most {LARGEST} of the 64 bits, got {number}: two images that "
            "have nothing in common differ in about 32"
        )
    return number


class _ColumnParams(DeclaredParams, group="Columns"):
    inputCol: Param[str] = Declaration(
        nonempty_text,
        "image",
        "the column that is compared",
        "Binary values with an encoded image each, or Spark's image structs; texts for "
        "hash='simhash', longs for hash='given'.",
        named=True,
    )
    within: Param[str | None] = Declaration(
        lambda name: optional(nonempty_text(name)),
        "label",
        "the column whose equal values are compared with each other; None compares all rows",
        "Null is a value like another.",
        named=True,
    )
    keep: Param[str] = Declaration(
        nonempty_text,
        "id",
        "the column that decides which of near rows stays: that with the smallest value",
        "It must be unique, without null.",
        named=True,
    )


class DedupParams(_ColumnParams, group="Rows"):
    """What the estimator and its model have."""

    hash = choice(
        HASHES,
        "what two rows are compared by",
        "'dhash', 'ahash', 'phash' and 'whash' are hashes of images, as the imagehash package has "
        "them, 'simhash' is one of texts, and 'given' says that inputCol has hashes of 64 bits.",
    )
    threshold: Param[int] = Declaration(
        _threshold,
        4,
        "the most bits of 64 in which the hashes of near rows differ",
        "A model may have a smaller one than it was fitted with.",
    )
    mode = choice(
        ("filter", "mark"),
        "what transform returns: the rows that stay, or all of them, marked",
        "Marked rows have 'duplicate_of', the keep value of a row that stays, and 'distance'; both "
        "are null for rows that stay.",
    )
