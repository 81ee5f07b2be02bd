"""Tables and configurations of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import yaml
from flights import data
from flights.features import FEATURES, build_features
from pyspark.sql import SparkSession

KEYS = ["carrier", "flight", "origin", "scheduled"]


def read_days(month: int, first: int, last: int) -> dict[str, pd.DataFrame]:
    """The raw tables, flights and weather of a few days only; ``row`` numbers the flights."""
    folder = data.find_data_folder()
    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv")
    days = {
        name: table[(table.month == month) & table.day.between(first, last)].reset_index(drop=True)
        for name, table in {"flights": flights, "weather": weather}.items()
    }
    return {
        **days,
        **{name: pd.read_csv(folder / f"{name}.csv") for name in ("planes", "airports")},
    }


def spark_features(spark: SparkSession, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The features by name, indexed by what identifies a flight; NaN where unknown."""
    columns = {
        "flights": data.FLIGHT_COLUMNS,
        "weather": data.WEATHER_COLUMNS,
        "planes": data.PLANE_COLUMNS,
        "airports": data.AIRPORT_COLUMNS,
    }
    frames = {}
    for name, types in columns.items():
        known = {"schema": pa.schema(types), "preserve_index": False}
        table = pa.Table.from_pandas(tables[name][list(types)], **known)
        frames[name] = spark.createDataFrame(table)
    rows = build_features(data.FlightTables(**frames)).toArrow()
    known = np.array(rows["known"].to_pylist(), dtype=float)
    named = pd.DataFrame(known, columns=[feature.name for feature in FEATURES])
    identity = rows.select([*KEYS, "label"]).to_pandas()
    return pd.concat([identity, named], axis=1).set_index(KEYS).sort_index()


def with_instants(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The flights with the instants of the clock, in minutes UTC.

    Arrival comes from the recorded clock time at the destination, which the job does not read.
    """
    flights = tables["flights"].copy()
    scheduled = pd.to_datetime(flights.time_hour) + pd.to_timedelta(flights.minute, unit="min")
    zones = tables["airports"].set_index("faa").tzone
    there = []
    for instant, dest in zip(scheduled, flights.dest, strict=True):
        local = instant.tz_convert(zones.get(dest, "America/Puerto_Rico"))
        there.append(local.hour * 60 + local.minute)
    flights["scheduled"] = scheduled.astype("int64") // 10**9 // 60
    if str(scheduled.dt.unit) == "us":
        flights["scheduled"] = scheduled.astype("int64") // 10**6 // 60
    flights["departed"] = flights.scheduled + flights.dep_delay
    flights["block"] = (_minutes(flights.sched_arr_time) - there) % 1440
    clock = _minutes(flights.arr_time) - (there + flights.dep_delay)
    flights["arrived"] = (flights.departed + clock % 1440).where(flights.arr_delay.notna())
    return flights


def _minutes(clock: pd.Series) -> pd.Series:
    return clock // 100 * 60 + clock % 100


ROWS = 600


def make_table(path: Path) -> dict[str, Any]:
    """Write it as Parquet; label is 1 where x + 2 (color is red) > 1. Returns its columns."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=ROWS)
    color = generator.choice(["red", "green", "blue"], size=ROWS)
    columns = {
        "id": np.arange(ROWS),
        "x": x,
        "color": color,
        "label": (x + 2 * (color == "red") > 1).astype("int64"),
        "part": np.where(np.arange(ROWS) % 3 == 0, "test", "train"),
    }
    path.mkdir(parents=True)
    for number in range(3):
        piece = {name: values[number::3] for name, values in columns.items()}
        pa.parquet.write_table(pa.table(piece), path / f"part-{number}.parquet")
    return columns


FEATURE = "pyspark.ml.feature"
LOGISTIC = "pyspark.ml.classification.LogisticRegression"
EVALUATOR = "pyspark.ml.evaluation.MulticlassClassificationEvaluator"


def made(kind: str, /, **arguments: Any) -> dict[str, Any]:
    """What builds an object of a class."""
    return {"class_path": kind, "init_args": arguments}


def configuration(folder: Path, **estimator: Any) -> dict[str, Any]:
    """The configuration: text to indices, indices to vectors, and a linear network."""
    return {
        "session": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
        "source": made("sparkdl.jobs.Files", path=str(folder / "table")),
        "rows": {"train": "part = 'train'", "test": "part = 'test'"},
        "stages": [
            made(f"{FEATURE}.StringIndexer", inputCol="color", outputCol="index"),
            made(f"{FEATURE}.OneHotEncoder", inputCol="index", outputCol="one_hot"),
            made(f"{FEATURE}.VectorAssembler", inputCols=["x", "one_hot"], outputCol="features"),
        ],
        "estimator": {
            "model": made("torch.nn.Linear", in_features=3, out_features=2),
            "loss": "torch.nn.functional.cross_entropy",
            "optimizer": made("torch.optim.Adam", lr=0.1),
            "batchSize": 32,
            "epochs": 6,
            "numWorkers": 2,
            "seed": 5,
            "progress": False,
            **estimator,
        },
        "baselines": {"constant": made(LOGISTIC, featuresCol="nothing", maxIter=1)},
        "evaluators": {"accuracy": made(EVALUATOR, metricName="accuracy")},
        **{name: str(folder / name) for name in ("model", "evaluation", "predictions")},
        "write": {"columns": ["id", "color", "prediction"], "partition_by": ["color"]},
    }


def write_configuration(folder: Path, said: dict[str, Any]) -> str:
    """Write it as YAML; returns the file's path."""
    (folder / "job.yaml").write_text(yaml.safe_dump(said))
    return str(folder / "job.yaml")
