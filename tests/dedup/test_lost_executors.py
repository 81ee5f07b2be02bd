"""A search whose executors die keeps the rows that it keeps without."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from near_rows import ids, kept_of_all_pairs, words_of
from pyspark.sql import DataFrame, SparkSession

from sparkdl import NearDuplicates

THRESHOLD = 6


def dying(frame: DataFrame, token: Path) -> DataFrame:
    """The same rows, of which one partition takes its executor along for each token there is."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 0 in batch["id"].to_pylist():
                try:
                    token.unlink()
                except FileNotFoundError:
                    yield batch
                    continue
                # A Python worker is a child of the daemon, which is a child of the executor.
                executor = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
                os.kill(executor, signal.SIGKILL)
            yield batch

    return frame.mapInArrow(rows, frame.schema)


@pytest.mark.nightly
def test_an_executor_that_dies_changes_no_row_that_stays(
    spark: SparkSession, table: DataFrame, tmp_path: Path
) -> None:
    words, labels = words_of("dhash")
    wanted = kept_of_all_pairs(words, labels, THRESHOLD)
    token = tmp_path / "token"
    rows = dying(table, token)

    token.touch()
    model = NearDuplicates(threshold=THRESHOLD).fit(rows)
    assert not token.exists()
    assert ids(model.kept(), "first") == wanted

    token.touch()  # the hashes that this executor has persisted are lost with it
    assert ids(model.transform(rows)) == wanted
    assert not token.exists()
    assert ids(model.kept(), "first") == wanted
    model.unpersist()
