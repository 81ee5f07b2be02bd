"""Data, seed and number of workers alone decide which rows a rank has, whatever the strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import cloudpickle
import pytest
import torch
from frames import CLASSES, estimator, features_of, frame, frame_of_sizes
from models import append_line, lines, task_rank
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import ParameterAveraging, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 90
FIRST_FEATURES = features_of(range(ROWS))[:, 0]


class Witness(nn.Module):
    """Writes down which task trained on which rows, known by their first feature."""

    def __init__(self, trace: str) -> None:
        super().__init__()
        self.trace = trace
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        if torch.is_grad_enabled() and task_rank() >= 0:
            for value in features[:, 0].tolist():
                append_line(f"{self.trace}-{task_rank()}", repr(value))
        scores: Tensor = self.layers(features)
        return scores


def trained(rows: DataFrame, trace: Path, aggregation: str) -> tuple[list[list[int]], TorchModel]:
    """The ids of the rows that each rank trained on, in order; and the model."""
    model = estimator(
        model=Witness(str(trace)),
        strategy=ParameterAveraging(period=2, aggregation=aggregation),
        numWorkers=3,
        epochs=2,
    ).fit(rows)
    ids = {torch.tensor(value).item(): number for number, value in enumerate(FIRST_FEATURES)}
    seen = [
        [ids[torch.tensor(float(value)).item()] for value in lines(f"{trace}-{rank}")]
        for rank in range(3)
    ]
    return seen, model


def files_of(rows: DataFrame, path: Path, **options: str) -> DataFrame:
    kind = "json" if options else "parquet"
    rows.write.format(kind).options(**options).save(path.as_uri())
    return rows.sparkSession.read.schema(rows.schema).format(kind).load(path.as_uri())


def cached(rows: DataFrame) -> DataFrame:
    kept = rows.cache()
    kept.count()
    return kept


DATA: dict[str, Callable[[SparkSession, Path], DataFrame]] = {
    "cached": lambda spark, path: cached(frame(spark, ROWS, 5).repartition(3)),
    "partitions": lambda spark, path: frame(spark, ROWS, 7),
    "uneven": lambda spark, path: cached(frame_of_sizes(spark, [50, 10, 30])),
    "files": lambda spark, path: files_of(frame(spark, ROWS, 5), path),
    "unsplittable": lambda spark, path: files_of(frame(spark, ROWS, 5), path, compression="gzip"),
    "computed": lambda spark, path: files_of(frame(spark, ROWS, 5), path).where(
        F.col("id") >= F.lit(0) + F.rand(1) * 0
    ),
}


@pytest.mark.nightly_variants
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(each, marks=[pytest.mark.versions] * (each in ("cached", "unsplittable")))
        for each in DATA
    ],
)
def test_averaging_among_executors_trains_on_the_rows_of_averaging_through_the_driver(
    spark: SparkSession, tmp_path: Path, data: str
) -> None:
    rows = DATA[data](spark, tmp_path / "rows")
    seen, through_driver = trained(rows, tmp_path / "driver", "driver")
    assert sorted(chain(*seen)) == sorted([*range(ROWS)] * 2)
    assert [len(each) for each in seen] == [ROWS // 3 * 2] * 3

    others, among_executors = trained(rows, tmp_path / "executors", "executors")

    rows.unpersist()
    assert others == seen
    for name, value in through_driver.module.state_dict().items():
        assert torch.allclose(among_executors.module.state_dict()[name], value, 1e-6, 1e-6), name
