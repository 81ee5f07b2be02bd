"""What a search for near-duplicates found, for people: counts, pairs to look at, label errors."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.dedup.hashing import IMAGE_HASHES, grey_images
from sparkdl.durable.local_files import LocalFiles, put_file
from sparkdl.report.html import table, text
from sparkdl.report.page import POLICY
from sparkdl.spark.rows.columns import quoted

SHOWN = 20
"""Pairs of each kind."""
_SIDE = 96
_CHARACTERS = 200
_STYLE = (
    "<style>.near td,.near th{padding:2px 8px;text-align:left;vertical-align:top}"
    ".near img{max-width:96px;max-height:96px;image-rendering:pixelated}</style>"
)


@dataclass(frozen=True)
class DuplicateReport:
    """What ``NearDuplicatesModel.report`` returns; a notebook shows it as a page.

    Attributes:
        summary: the counts in a sentence.
        kept: how many rows each threshold keeps: ``threshold``, ``rows`` and ``share`` of all.
        pairs: rows that go, with the nearest that stays: ``row``, ``duplicate_of``, ``distance``;
            of each distance about as many.
        conflicts: near rows with different labels, the nearest first: ``row``, ``label``,
            ``other``, ``other_label``, ``distance``.
        num_conflicts: how many there are, of different hashes.
        values: by ``keep``, what the rows of both have in ``inputCol``: PNG files, or texts.
    """

    summary: str
    kept: pd.DataFrame
    pairs: pd.DataFrame
    conflicts: pd.DataFrame
    num_conflicts: int
    values: dict[Any, bytes | str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as an HTML file that needs nothing else, whole or not at all."""
        page = (
            '<!doctype html><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}; img-src data:">'
            f"<title>Near-duplicates</title>{self.to_html()}"
        )
        put_file(LocalFiles(), os.path.realpath(path), lambda file: file.write(page.encode()))

    def to_html(self) -> str:
        """The page."""
        parts = [_STYLE, f"<p>{text(self.summary, 2000)}</p>", _table(self.kept, {})]
        if len(self.pairs):
            parts += ["<h4>Rows that go, and those that stay</h4>", _table(self.pairs, self.values)]
        if len(self.conflicts):
            title = f"{self.num_conflicts:,} near pairs with different labels"
            parts += [f"<h4>{title}</h4>", _table(self.conflicts, self.values)]
        return f'<div class="near">{"".join(parts)}</div>'

    def __repr__(self) -> str:
        return f"{self.summary}\n{self.kept.to_string(index=False)}"

    def _repr_html_(self) -> str:
        return self.to_html()


def _table(rows: pd.DataFrame, values: dict[Any, bytes | str]) -> str:
    cells = ([_cell(n, v, values) for n, v in row.items()] for _, row in rows.iterrows())
    return table(dict.fromkeys(rows.columns, ""), cells)


def _cell(name: Any, value: Any, values: dict[Any, bytes | str]) -> str:
    shown = text(f"{value:.4f}" if name == "share" else value)
    known = values.get(_plain(value)) if name in ("row", "duplicate_of", "other") else None
    if isinstance(known, bytes):
        return f'{shown}<br><img src="data:image/png;base64,{base64.b64encode(known).decode()}">'
    return shown if known is None else f"{shown}<br>{text(known)}"


def examples(duplicates: DataFrame, keep: str) -> DataFrame:
    """Some duplicates of each distance, the same in every run."""
    named = duplicates.withColumnRenamed(keep, "row")
    order = Window.partitionBy("distance").orderBy(F.xxhash64("row"), "row")
    ranked = named.withColumn("rank", F.row_number().over(order))
    return ranked.orderBy("rank", "distance").drop("rank").limit(SHOWN)


def collected(frame: DataFrame) -> pd.DataFrame:
    """The rows of a DataFrame, with U+FFFD for bytes that are no UTF-8."""
    texts = [field.name for field in frame.schema if field.dataType == T.StringType()]
    found: pd.DataFrame = frame.withColumns(
        {name: quoted(name).cast("binary") for name in texts}
    ).toPandas()
    for name in texts:
        found[name] = [
            each if each is None else bytes(each).decode(errors="replace") for each in found[name]
        ]
    return found


def values_of(
    dataset: DataFrame, kind: str, value: str, keep: str, wanted: DataFrame
) -> dict[Any, bytes | str]:
    """What some rows look like, by ``keep``; both as pandas has them."""
    every = dataset.select(quoted(keep).alias("row"), quoted(value).alias("value"))
    rows = every.join(F.broadcast(wanted), "row", "left_semi")
    if kind == "simhash":
        rows = rows.select("row", F.substring("value", 1, _CHARACTERS).alias("value"))
    elif kind in IMAGE_HASHES:
        schema = T.StructType([rows.schema["row"], T.StructField("value", T.BinaryType())])
        rows = rows.mapInArrow(_small, schema)
    else:
        return {}
    found = collected(rows)
    pairs = zip(found["row"], found["value"], strict=True)
    return {_plain(row): _plain(value) for row, value in pairs}


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


def _small(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        files = []
        for image in grey_images(batch.column("value")):
            image.thumbnail((_SIDE, _SIDE))
            target = io.BytesIO()
            image.save(target, "PNG")
            files.append(target.getvalue())
        columns = [batch.column("row"), pa.array(files, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["row", "value"])
