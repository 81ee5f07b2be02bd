"""Which of near rows is kept, also on executors that are lost."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from near_rows import bits_apart, ids, kept_of_all_pairs, words_of
from pyspark.sql import DataFrame, SparkSession

from sparkdl import NearDuplicates
from sparkdl.dedup.pairs import dropped


def kept(words: np.ndarray, threshold: int) -> list[list[int]]:
    """Which rows each threshold from 1 keeps, of different words in their order."""
    distance = bits_apart(words[:, None], words[None, :])
    later, earlier = np.nonzero(np.tril(distance <= threshold, -1))  # sorted by the later one
    found, bits = dropped(words[earlier], words[later], distance[later, earlier], threshold)
    by_word = dict(zip(found.tolist(), bits.tolist(), strict=True))
    return [
        [row for row, word in enumerate(words.tolist()) if not by_word.get(word, 0) >> limit & 1]
        for limit in range(1, threshold + 1)
    ]


@given(st.lists(st.integers(-128, 127), unique=True, max_size=60), st.integers(1, 4))
def test_it_is_what_comparing_every_pair_keeps(words: list[int], threshold: int) -> None:
    wanted = [kept_of_all_pairs(words, [0] * len(words), t) for t in range(1, threshold + 1)]
    assert kept(np.array(words, dtype=np.int64), threshold) == wanted


def test_a_long_chain_takes_no_rounds() -> None:
    """A film: each picture is near the next only."""
    frames = np.arange(200_000)
    found, bits = dropped(frames[:-1], frames[1:], np.ones(len(frames) - 1, np.int64), 1)
    assert found.tolist() == list(range(1, 200_000, 2))
    assert set(bits.tolist()) == {2}


def test_deciding_takes_little_memory_beside_the_pairs() -> None:
    """A star: one word near all others, in a million pairs of 24 bytes."""
    first, others = np.zeros(1_000_000, np.int64), np.arange(1, 1_000_001) % 7 + 1
    near = np.ones_like(others)
    tracemalloc.start()
    dropped(first, others, near, 1)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


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
