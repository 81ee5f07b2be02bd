"""Near-duplicates: a million hashes, against crossJoin, and what is removed from digits.

Local mode on two cores. The digits are scikit-learn's, to which a quarter of near copies is added:
shifted by a quarter of a pixel of 8 x 8, with noise. See benchmarks/README.md for the claims.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Claim
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import NearDuplicates

HASHES, COPIES = 1_000_000, 4
THRESHOLD = 3
SMALL, LARGE = 20_000, 200_000
"""Rows that are also compared pair by pair: each ten times takes Spark a hundred times as long."""
CORES = 2
CONF = {"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "8"}


def write_hashes(path: Path, rows: int) -> None:
    """Write hashes of which every fourth is near an earlier one."""
    random = np.random.default_rng(0)
    words = random.integers(-(2**63), 2**63, rows - rows // COPIES, dtype=np.int64)
    copies = words[random.integers(len(words), size=rows // COPIES)]
    for _ in range(2):
        flipped = np.uint64(1) << random.integers(64, size=len(copies), dtype=np.uint64)
        copies = copies ^ flipped.view(np.int64)
    pq.write_table(pa.table({"id": np.arange(rows), "image": np.append(words, copies)}), path)


def search(rows: DataFrame) -> float:
    """Returns the seconds of a fit."""
    start = time.perf_counter()
    model = NearDuplicates(hash="given", threshold=THRESHOLD, within=None).fit(rows)
    seconds = time.perf_counter() - start
    model.words.unpersist()
    return seconds


def cross_join(rows: DataFrame) -> float:
    """Returns the seconds in which Spark compares all pairs."""
    start = time.perf_counter()
    near = f"a.id < b.id and bit_count(a.image ^ b.image) <= {THRESHOLD}"
    rows.alias("a").crossJoin(rows.alias("b")).where(near).count()
    return time.perf_counter() - start


def against_pairs(spark: SparkSession, folder: Path, number: int, repeats: int) -> Claim:
    """Search a table in turns with Spark's comparison of all its pairs."""
    path = folder / f"{number}.parquet"
    write_hashes(path, number)
    rows = spark.read.parquet(str(path))
    search(rows)  # the first job of a session is slower
    turns = {"ours": partial(search, rows), "crossJoin": partial(cross_join, rows)}
    measured = harness.interleave(turns, repeats=repeats)
    medians = harness.show_each(measured, f"{number:,} rows, {{}}", digits=2)
    name = f"crossJoin / ours, {number:,} rows"
    return harness.faster(name, medians["ours"], medians["crossJoin"], target=50)


def digits(folder: Path, seed: int = 7) -> tuple[int, int]:
    """Write digits of 320 x 320 pixels, of which a quarter are copies; returns both numbers.

    A copy is shifted by up to one pixel each way, and has noise of 8 grey levels. Copies have the
    larger numbers. A fifth of the digits is held out; nothing of them is in the other table.
    """
    from sklearn.datasets import load_digits

    random, source = np.random.default_rng(seed), load_digits()
    held_out = random.permutation(len(source.images)) < len(source.images) // 5
    images, labels = source.images[~held_out], source.target[~held_out]
    large = [
        np.asarray(Image.fromarray((each * 15.9).astype(np.uint8)).resize((320, 320), 3))
        for each in images
    ]
    copied = random.integers(len(images), size=len(images) // 3)
    copies = [
        np.roll(large[index], random.integers(-1, 2, 2), (0, 1)) + random.normal(0, 8, (320, 320))
        for index in copied
    ]
    pixels = [each.clip(0, 255).astype(np.uint8) for each in (*large, *copies)]
    features = [np.asarray(Image.fromarray(each).resize((8, 8), 4)) / 255.0 for each in pixels]
    table: dict[str, Any] = {
        "id": np.arange(len(pixels)),
        "image": [_png(each) for each in pixels],
        "label": np.append(labels, labels[copied]),
        "features": [each.reshape(-1).astype(np.float32) for each in features],
    }
    pq.write_table(pa.table(table), folder / "digits.parquet", row_group_size=200)
    test = (source.images[held_out] / 16.0).reshape(-1, 64).astype(np.float32)
    labelled = {"features": list(test), "label": source.target[held_out]}
    pq.write_table(pa.table(labelled), folder / "held-out.parquet")
    return len(large), len(copies)


def _png(pixels: np.ndarray) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "PNG", compress_level=1)
    return target.getvalue()


def headline(spark: SparkSession, folder: Path) -> tuple[dict[str, float], list[Claim]]:
    """What is removed of the digits, and how accurate a classifier of the others is."""
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.functions import array_to_vector

    originals, copies = digits(folder)
    rows = spark.read.parquet(str(folder / "digits.parquet"))
    held_out = spark.read.parquet(str(folder / "held-out.parquet"))
    rows, held_out = (
        f.withColumn("features", array_to_vector("features")) for f in (rows, held_out)
    )
    found = NearDuplicates(hash="phash", threshold=20).fit(rows)
    kept = found.copy({found.threshold: 2}).kept()
    stay = kept.agg(
        F.count_if(F.col("first") < originals), F.count_if(F.col("first") >= originals)
    ).first()
    assert stay is not None
    lost, removed = 1 - stay[0] / originals, 1 - stay[1] / copies
    counts = {t: found.copy({found.threshold: t}).kept().count() for t in range(0, 21, 2)}
    few = min(counts, key=lambda t: abs(counts[t] / (originals + copies) - 0.25))
    at_2, at_most = (found.transform(rows, {found.threshold: t}).persist() for t in (2, few))
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    everything, fewer, least = (
        accuracy.evaluate(LogisticRegression(maxIter=50).fit(each).transform(held_out))
        for each in (rows, at_2, at_most)
    )
    measured = {
        "rows": originals + copies,
        "copies_removed": removed,
        "originals_removed": lost,
        "threshold_at_most": few,
        "accuracy_all": everything,
        "accuracy_at_2": fewer,
        "accuracy_at_most": least,
    }
    return measured, [
        Claim(name="copies removed at threshold 2", ratio=removed, target=0.95, at_least=True),
        Claim(name="originals removed", ratio=lost, target=0.02),
        Claim(
            name="accuracy lost with the copies, points",
            ratio=100 * (everything - fewer),
            target=0.3,
        ),
        Claim(
            name="accuracy lost with about 75 % of the rows, points",
            ratio=100 * (everything - least),
            target=5,
        ),
    ]


def main() -> None:
    chosen = harness.parse(harness.parser(__doc__), repeats=1)
    number = HASHES // 10 if chosen.quick else HASHES
    os.environ.update(harness.child_environment())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        spark = harness.session(f"local[{CORES}]", CONF | {"spark.local.dir": scratch})
        sizes = (SMALL,) if chosen.quick else (SMALL, LARGE)
        pairs = [against_pairs(spark, folder, size, chosen.repeats) for size in sizes]
        write_hashes(folder / "many.parquet", number)
        seconds = search(spark.read.parquet(str(folder / "many.parquet")))
        found, of_digits = headline(spark, folder)
        spark.stop()
    took = harness.show(f"{number:,} hashes, threshold {THRESHOLD}", [seconds], digits=1)
    many = harness.claim(f"{number:,} hashes / 90 s", took, 90, target=1)
    harness.report("duplicates", [many, *pairs, *of_digits], found)


if __name__ == "__main__":
    main()
