"""Workers that exchange among themselves, and on the rows that others would have."""

from __future__ import annotations

import copy
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from frames import (
    CLASSES,
    descended,
    estimator,
    features_of,
    frame,
    frame_of_sizes,
    ids_by_partition,
    labels_of,
)
from models import Saboteur, append_line, lines, task_rank
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from waiting import eventually

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging, TorchModel
from sparkdl.errors import ConfigError, DataError, TrainingError
from sparkdl.spark.cluster import slots
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.slots import require_free_slots

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALL_REDUCE = GradientAllReduce()


def test_three_executors_train_as_one_process_on_all_rows(spark: SparkSession) -> None:
    """Whole shards as batches, so that every step is on all rows whatever their order."""
    tuned = estimator(strategy=ALL_REDUCE, numWorkers=3, batchSize=1000, epochs=4)
    start = copy.deepcopy(tuned.getModel())
    oracle = descended(start, labels_of(range(70)), lr=0.1, steps=4).state_dict()
    model = tuned.fit(frame(spark, rows=70, partitions=3))
    for name, value in model.module.state_dict().items():
        assert float((value - oracle[name]).abs().max() / oracle[name].abs().max()) <= 1e-5, name
    assert [row.examples for row in model.history] == [70] * 4


def union(spark: SparkSession) -> DataFrame:
    return frame(spark, 30, 1).union(frame(spark, 30, 1)).union(frame(spark, 30, 1))


def coalesced(spark: SparkSession) -> DataFrame:
    return frame(spark, 60, 9).coalesce(3)


def limited(spark: SparkSession) -> DataFrame:
    return frame(spark, 60, 9).limit(50)


def uneven(spark: SparkSession) -> DataFrame:
    return frame_of_sizes(spark, [0, 54, 6])


@pytest.mark.gate
@pytest.mark.nightly_variants(daily=2)
@pytest.mark.parametrize(
    ("make", "rows"),
    [(union, 90), (uneven, 60), (coalesced, 60), (limited, 50)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_lineage_can_be_trained_on(
    spark: SparkSession, make: Callable[[SparkSession], DataFrame], rows: int
) -> None:
    model = estimator(strategy=ALL_REDUCE, numWorkers=3).fit(make(spark))
    assert model.history[0].examples == rows


@pytest.mark.gate
def test_a_rank_killed_in_training_ends_the_fit_and_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    started = time.monotonic()
    dying = estimator(
        model=Saboteur(str(tmp_path / "passes"), "die"),
        strategy=ALL_REDUCE,
        numWorkers=3,
        epochs=2,
        timeout=120.0,
        maxFailures=1,
    )
    with pytest.raises(TrainingError, match="rank 1"):
        dying.fit(frame(spark, rows=90, partitions=3))
    assert time.monotonic() - started < 90
    assert_next_fit_works(spark)


def assert_next_fit_works(spark: SparkSession) -> None:
    model = estimator(strategy=ALL_REDUCE, numWorkers=3).fit(frame(spark))
    assert model.history[0].examples == 60


@pytest.mark.gate
def test_slots_held_by_another_job_are_an_error_with_numbers_in_seconds(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slots, "OTHERS_END_S", 1.0)
    folder = str(tmp_path)

    def hold(_: Any) -> Any:
        open(os.path.join(folder, f"started-{os.getpid()}"), "w").close()
        time.sleep(60)
        return []

    def run_other() -> None:
        spark.sparkContext.setJobGroup("other", "holds slots", interruptOnCancel=True)
        with pytest.raises(Exception, match="cancelled"):
            spark.sparkContext.parallelize(range(2), 2).mapPartitions(hold).collect()

    other = threading.Thread(target=run_other)
    other.start()
    try:
        assert eventually(lambda: len(os.listdir(folder)) == 2, 60)
        with pytest.raises(ConfigError, match=r"3 workers .* other jobs hold 2 of the.* 3"):
            estimator(strategy=ALL_REDUCE, numWorkers=3).fit(frame(spark))
        require_free_slots(spark, 1)
    finally:
        spark.sparkContext.cancelJobGroup("other")
        other.join(60)
    monkeypatch.undo()  # the killed tasks may take longer to leave
    assert_next_fit_works(spark)


def test_a_range_of_ports_that_is_none_is_refused() -> None:
    for text in ("40000", "40100-40000", "0-10", "a-b", "1-70000"):
        conf = {"spark.sparkdl.collective.ports": text}
        spark: Any = SimpleNamespace(conf=conf, sparkContext=SimpleNamespace(_conf={}))
        with pytest.raises(ConfigError, match="must be two ports such as '40000-40100'"):
            network_of(spark)


def test_interface_and_ports_come_from_the_spark_settings(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = spark.sparkContext.getConf()
    assert network_of(spark).driver == conf.get("spark.driver.host")
    conf.set("spark.sparkdl.collective.ports", "40000-40100")
    conf.set("spark.sparkdl.collective.interface", "eth7")
    monkeypatch.setattr(spark.sparkContext, "_conf", conf)
    assert network_of(spark).ports == (40000, 40100)
    assert network_of(spark).interface == "eth7"
    spark.conf.set("spark.sparkdl.collective.interface", "eth9")  # in a session that runs
    try:
        assert network_of(spark).interface == "eth9"
    finally:
        spark.conf.unset("spark.sparkdl.collective.interface")
    chosen = network_of(spark, interface="eth8", ports="50000-50001")
    assert (chosen.interface, chosen.ports) == ("eth8", (50000, 50001))


class Noting(nn.Module):
    """Notes where the workers' store is."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.folder = folder

    def forward(self, features: Tensor) -> Tensor:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store().underlying_store
            Path(self.folder, f"{store.host}:{store.port}").touch()
        return self.layer(features)


@pytest.mark.gate
def test_the_params_choose_interface_and_port_of_a_fit(spark: SparkSession, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        model = estimator(
            model=Noting(str(tmp_path)),
            strategy=ALL_REDUCE,
            numWorkers=3,
            collectiveInterface="127.0.0.0/8",
            collectivePorts=f"{port}-{port + 40}",
        ).fit(frame(spark))
    assert model.history[0].examples == 60
    (told,) = (path.name for path in tmp_path.iterdir())
    host, _, chosen = told.rpartition(":")
    assert host == "127.0.0.1"
    assert port < int(chosen) <= port + 40


cloudpickle.register_pickle_by_value(sys.modules[__name__])
FILES, ROWS, WORKERS = 16, 480, 2


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Files that are sorted by class: each has rows of one only."""
    path = (tmp_path_factory.mktemp("rows") / "table").as_uri()
    rows = frame(spark, ROWS, 1).sort("label").coalesce(1)
    rows.write.option("maxRecordsPerFile", ROWS // FILES).parquet(path)
    return spark.read.parquet(path)


def labels_and_ids() -> list[tuple[int, int]]:
    worker = sparkdl.current_worker()
    return [
        (int(label), int(row))
        for batch in worker.batches(20)
        for label, row in zip(batch["label"], batch["id"], strict=True)
    ]


@pytest.mark.gate
@pytest.mark.nightly_variants
@pytest.mark.parametrize("by", ["fit", "run"])
def test_a_bad_row_is_named_where_the_users_dataframe_has_it(files: DataFrame, by: str) -> None:
    bad = 333
    label = F.when(F.col("id") != bad, F.col("label"))
    rows = files.withColumn("label", label)
    parts = ids_by_partition(files)
    ((partition, position),) = [
        (number, part.index(bad)) for number, part in enumerate(parts) if bad in part
    ]
    fit = partial(estimator(strategy=ALL_REDUCE, numWorkers=WORKERS).fit, rows)
    run = partial(sparkdl.run, labels_and_ids, num_workers=WORKERS, df=rows)
    with pytest.raises(DataError, match=rf"row {position} of partition {partition}\b"):
        (fit if by == "fit" else run)()


SAME_ROWS = 90
FIRST_FEATURES = features_of(range(SAME_ROWS))[:, 0]


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
    "cached": lambda spark, path: cached(frame(spark, SAME_ROWS, 5).repartition(3)),
    "partitions": lambda spark, path: frame(spark, SAME_ROWS, 7),
    "uneven": lambda spark, path: cached(frame_of_sizes(spark, [50, 10, 30])),
    "files": lambda spark, path: files_of(frame(spark, SAME_ROWS, 5), path),
    "unsplittable": lambda spark, path: files_of(
        frame(spark, SAME_ROWS, 5), path, compression="gzip"
    ),
    "computed": lambda spark, path: files_of(frame(spark, SAME_ROWS, 5), path).where(
        F.col("id") >= F.lit(0) + F.rand(1) * 0
    ),
}


@pytest.mark.gate
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
    assert sorted(chain(*seen)) == sorted([*range(SAME_ROWS)] * 2)
    assert [len(each) for each in seen] == [SAME_ROWS // 3 * 2] * 3

    others, among_executors = trained(rows, tmp_path / "executors", "executors")

    rows.unpersist()
    assert others == seen
    for name, value in through_driver.module.state_dict().items():
        assert torch.allclose(among_executors.module.state_dict()[name], value, 1e-6, 1e-6), name
