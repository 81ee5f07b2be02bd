"""Near-duplicates: a million hashes, against crossJoin, and what is removed from digits.

Local mode on two cores. The digits are scikit-learn's, to which a quarter of near copies is added:
shifted by a quarter of a pixel of 8 x 8, with noise. See benchmarks/README.md for the claims.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Claim, arguments, child_environment, claim, report, session, show
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import NearDuplicates, NearDuplicatesModel

HASHES, COPIES = 1_000_000, 4
THRESHOLD = 3
SMALL, LARGE = 20_000, 200_000
"""Rows that are also compared pair by pair: each ten times takes Spark a hundred times as long."""
CORES = 2
DRIVER_MEMORY = "2g"


class PeakMemory:
    """The most memory that this process and those below it have held, in MB, while it is open."""

    def __enter__(self) -> PeakMemory:
        self.peak, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        here = psutil.Process()
        while not self._over.wait(0.2):
            held = 0
            for process in (here, *here.children(recursive=True)):
                try:
                    held += process.memory_full_info().pss
                except psutil.Error:  # it is over
                    continue
            self.peak = max(self.peak, held / 1e6)


def write_hashes(path: Path, rows: int, seed: int = 0) -> int:
    """Write hashes of which every fourth is near an earlier one; returns how many are not."""
    random = np.random.default_rng(seed)
    originals = rows - rows // COPIES
    words = random.integers(-(2**63), 2**63, originals, dtype=np.int64)
    copies = words[random.integers(originals, size=rows // COPIES)]
    for _ in range(2):
        flipped = np.uint64(1) << random.integers(64, size=len(copies), dtype=np.uint64)
        copies = copies ^ flipped.view(np.int64)
    pq.write_table(pa.table({"id": np.arange(rows), "image": np.append(words, copies)}), path)
    return originals


def search(rows: DataFrame) -> tuple[float, NearDuplicatesModel]:
    """Returns the seconds of a fit, and the model."""
    start = time.perf_counter()
    model = NearDuplicates(hash="given", threshold=THRESHOLD, within=None).fit(rows)
    return time.perf_counter() - start, model


def cross_join(rows: DataFrame) -> tuple[float, int]:
    """Returns the seconds in which Spark compares all pairs, and how many are near."""
    start = time.perf_counter()
    first, second = rows.alias("a"), rows.alias("b")
    near = first.crossJoin(second).where(
        f"a.id < b.id and bit_count(a.image ^ b.image) <= {THRESHOLD}"
    )
    number = near.count()
    return time.perf_counter() - start, number


def against_pairs(spark: SparkSession, folder: Path, number: int, repeats: int) -> list[Claim]:
    """Search a table in turns with Spark's comparison of all its pairs."""
    path = folder / f"{number}.parquet"
    write_hashes(path, number)
    rows = spark.read.parquet(str(path))
    search(rows)[1].unpersist()  # the first job of a session is slower
    ours, theirs = [], []
    for _ in range(repeats):
        seconds, model = search(rows)
        model.unpersist()
        ours.append(seconds)
        theirs.append(cross_join(rows)[0])
    mine = show(f"{number:,} rows", ours, digits=2)
    peer = show(f"{number:,} rows, crossJoin", theirs, digits=2)
    return [
        Claim(
            name=f"crossJoin / ours, {number:,} rows",
            ratio=peer / mine,
            target=50,
            at_least=True,
            ours=mine,
            peer=peer,
        )
    ]


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
        "share_at_2": at_2.count() / (originals + copies),
        "share_at_most": at_most.count() / (originals + copies),
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
    chosen = arguments(__doc__, repeats=1)
    number = HASHES // 10 if chosen.quick else HASHES
    os.environ.update(child_environment())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        conf = {
            "spark.driver.memory": DRIVER_MEMORY,
            "spark.ui.enabled": "false",
            "spark.local.dir": scratch,
            "spark.sql.shuffle.partitions": "8",
        }
        spark = session(f"local[{CORES}]", conf)
        spark.sparkContext.setLogLevel("ERROR")
        distinct = write_hashes(folder / "many.parquet", number)
        many = spark.read.parquet(str(folder / "many.parquet"))
        claims = against_pairs(spark, folder, SMALL, chosen.repeats)
        if not chosen.quick:
            claims += against_pairs(spark, folder, LARGE, chosen.repeats)
        with PeakMemory() as memory:
            seconds, model = search(many)
        kept = model.kept().count()
        model.unpersist()
        took = show(f"{number:,} hashes, threshold {THRESHOLD}", [seconds], digits=1)
        found, of_digits = headline(spark, folder)
        spark.stop()
    report(
        "duplicates",
        [
            claim(f"{number:,} hashes / 90 s", took, 90, target=1),
            *claims,
            *of_digits,
        ],
        {
            "seconds": seconds,
            "kept": kept,
            "originals": distinct,
            "peak_memory_mb": memory.peak,
            **found,
        },
    )


if __name__ == "__main__":
    main()
