"""What Spark shows of a folder of files (``binaryFile``) is what workers read of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import configured, estimator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from test_parquet_settings import plain, read_by_us
from torch import Tensor, nn

from sparkdl import TorchModel
from sparkdl.spark.rows.in_files import columns_in_files

FILES = {  # of which Spark leaves out the empty one, and hidden ones
    "kind=a/0.jpg": 40,
    "kind=a/a file%20of #1?.jpg": 5,
    "kind=a/empty.jpg": 0,
    "kind=b/2.png": 17,
    "kind=b/.hidden.jpg": 3,
    "kind=b/_temporary/3.jpg": 4,
    "kind=b/deeper/4.jpg": 9,
    "kind=b/ü.jpg": 3000,
}
OLD = "kind=a/0.jpg"
Change = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders") / "a%20 folder"
    for number, (name, size) in enumerate(FILES.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((number + k) % 256 for k in range(size)))
    os.utime(root / OLD, (1e9, 1e9))  # in 2001
    return root


def load(spark: SparkSession, folder: Path, **options: str) -> DataFrame:
    return spark.read.format("binaryFile").options(**options).load(f"file://{folder}")


@dataclass(frozen=True)
class Case:
    """A way to read the folder.

    Attributes:
        rows: how many Spark shows.
        options: of the reader.
        settings: of Spark.
        change: what is done with what was read.
        ours: whether workers are to read the content.
    """

    rows: int = 5
    options: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    change: Change = lambda df: df
    ours: bool = True


CASES = {
    "read": Case(),
    "all folders": Case(5, {"recursiveFileLookup": "true"}),
    "some names": Case(4, {"pathGlobFilter": "*.jpg"}),
    "before": Case(1, {"modifiedBefore": "2005-01-01T00:00:00"}),
    "after": Case(4, {"modifiedAfter": "2005-01-01T00:00:00"}),
    "a part": Case(3, change=lambda df: df.where("kind = 'b'")),
    "by path": Case(2, change=lambda df: df.where(F.col("path").rlike("[02].(jp|pn)g$"))),
    "by length": Case(4, change=lambda df: df.where("length between 1 and 100")),
    "by time": Case(1, change=lambda df: df.where("modificationTime < '2005-01-01'")),
    "by content": Case(5, change=lambda df: df.where("length(content) > 0")),
    "none": Case(0, change=lambda df: df.where("length < 0")),
    "coalesced": Case(5, change=lambda df: df.coalesce(1)),
    "renamed": Case(5, change=lambda df: df.withColumnRenamed("content", "x"), ours=False),
    "in many partitions": Case(5, settings={"spark.sql.files.maxPartitionBytes": "1"}),
    "computed": Case(5, change=lambda df: df.withColumn("x", F.expr("content")), ours=False),
    "shuffled": Case(5, change=lambda df: df.repartition(2), ours=False),
    "files that may be missing": Case(5, {"ignoreMissingFiles": "true"}, ours=False),
    "files that may be damaged": Case(
        5, settings={"spark.sql.files.ignoreCorruptFiles": "true"}, ours=False
    ),
    "archives": Case(5, {"wholeFile": "false"}, ours=False),
    "a limit": Case(5, settings={"spark.sql.sources.binaryFile.maxLength": "4000"}, ours=False),
}


@pytest.mark.slow
def test_what_workers_read_of_a_folder_is_what_spark_shows(
    spark: SparkSession, folder: Path
) -> None:
    for name, case in CASES.items():
        with configured(spark, case.settings):
            frame = case.change(load(spark, folder, **case.options))
            column = "x" if "x" in frame.columns else "content"
            of_files = columns_in_files(frame, {"c0": column})
            assert bool(of_files) == case.ours, name
            shown = [plain(row[0]) for row in frame.select(column).collect()]
            assert len(shown) == case.rows, name
            if of_files:
                assert read_by_us(frame, of_files) == shown, name


class Weighed(nn.Module):
    """The sum of a row's bytes, each by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, octets: Tensor) -> Tensor:
        places = torch.arange(1.0, octets.shape[1] + 1)
        return (octets.float() @ places)[:, None] * self.weight


@pytest.mark.slow
def test_a_folder_trains_and_predicts_as_the_rows_that_spark_reads(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also after files were rewritten, which Spark reads as they are now."""
    for number in range(12):
        (tmp_path / f"{number}.bin").write_bytes(bytes(range(number, number + 6)))
    rows = load(spark, tmp_path).withColumn("y", F.col("length").cast("float"))
    by_spark = rows.withColumn("content", F.expr("content"))
    assert columns_in_files(rows, {"c0": "content"})
    settings = {
        "model": Weighed,
        "loss": nn.MSELoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-7),
        "featuresCol": "content",
        "labelCol": "y",
        "columnShapes": {"content": [6]},
        "columnDtypes": {"content": "uint8"},
        "batchSize": 4,
        "validationFraction": 0.3,
    }
    first, second = (estimator(**settings).fit(each) for each in (rows, by_spark))
    assert torch.equal(first.module.weight, second.module.weight)
    assert first.history[0].validation_loss == second.history[0].validation_loss
    assert 0 < first.history[0].examples < 12
    model: TorchModel = first

    def predicted(frame: DataFrame) -> dict[str, float]:
        return {row.path: row.prediction for row in model.transform(frame).collect()}

    before = predicted(rows)
    assert before == predicted(by_spark)
    for number in range(12):
        (tmp_path / f"{number}.bin").write_bytes(bytes(range(100, 106)))
    after = predicted(rows)
    assert after == predicted(by_spark)
    assert len(set(after.values())) == 1 < len(set(before.values()))


def test_a_file_that_is_gone_fails_the_job_for_us_as_for_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(b"abc")
    rows = load(spark, tmp_path)
    of_files = columns_in_files(rows, {"c0": "content"})
    (tmp_path / "1.bin").unlink()
    reads: list[Callable[[], Any]] = [
        rows.select("content").collect,
        lambda: read_by_us(rows, of_files),
    ]
    for read in reads:
        with pytest.raises(Exception, match=r"1\.bin"):
            read()
