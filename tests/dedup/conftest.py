"""Tables of digits, a quarter of them near copies."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from near_rows import digits, png
from PIL import Image
from pyspark.sql import DataFrame, SparkSession

ROWS = 2_000


@pytest.fixture(scope="session")
def table(spark: SparkSession) -> DataFrame:
    """2,000 pictures; ``id`` is their order, in which they do not lie."""
    images, labels = digits(ROWS)
    order = np.random.default_rng(5).permutation(ROWS)
    rows = pa.table(
        {
            "id": pa.array(order, pa.int64()),
            "image": pa.array([png(Image.fromarray(images[row])) for row in order], pa.binary()),
            "label": pa.array([labels[row] for row in order], pa.int64()),
            "name": pa.array([f"digit {row}" for row in order]),
        }
    )
    return spark.createDataFrame(rows).repartition(3)
