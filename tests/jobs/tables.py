"""Three stormy days of the real tables, read by pandas, and their features from Spark."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
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
        "planes": pd.read_csv(folder / "planes.csv"),
        "airports": pd.read_csv(folder / "airports.csv"),
    }


def spark_features(spark: SparkSession, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The features by name, indexed by what identifies a flight; NaN where unknown."""
    columns = {
        "flights": data.FLIGHT_COLUMNS,
        "weather": data.WEATHER_COLUMNS,
        "planes": data.PLANE_COLUMNS,
        "airports": data.AIRPORT_COLUMNS,
    }
    frames = {
        name: spark.createDataFrame(
            pa.Table.from_pandas(
                tables[name][list(types)], schema=pa.schema(types), preserve_index=False
            )
        )
        for name, types in columns.items()
    }
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
