"""A fit seeds its workers, and puts the random numbers of their processes back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import torch
from frames import estimator, frame
from pyspark.sql import SparkSession

COLUMNS = "pid bigint, python double, numpy double, torch double"


def streams(spark: SparkSession) -> dict[int, tuple[float, ...]]:
    """What each executor's Python process would draw next."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        drawn = [os.getpid(), random.random(), np.random.random(), float(torch.rand(()))]
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        names = [column.split()[0] for column in COLUMNS.split(", ")]
        yield pa.RecordBatch.from_arrays([pa.array([value]) for value in drawn], names)

    rows = spark.range(0, 3, 1, 3).mapInArrow(look, COLUMNS).collect()
    return {row.pid: (row.python, row.numpy, row.torch) for row in rows}


@pytest.mark.slow
def test_the_users_other_jobs_do_not_draw_what_a_fit_has_seeded(spark: SparkSession) -> None:
    estimator(numWorkers=3).fit(frame(spark))
    before = streams(spark)
    estimator(numWorkers=3).fit(frame(spark))
    after = streams(spark)
    both = before.keys() & after.keys()
    assert both, "no process was used again"
    assert [after[pid] for pid in both] == [before[pid] for pid in both]
