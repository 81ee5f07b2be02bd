"""The job that predicts: rows and a saved model in, a table of predictions out."""

from __future__ import annotations

import time

from pyarrow import fs
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from sparkdl.errors import CheckpointError
from sparkdl.jobs import logs
from sparkdl.jobs.command import JobContext, JobOutput, load_model, locate, run_command
from sparkdl.jobs.sources import TableFormat


def main(arguments: list[str] | None = None) -> int:
    """Run predict.py; returns its exit code."""
    return run_command("predict", predict, arguments)


def predict(context: JobContext) -> JobOutput:
    """Write a saved model's predictions.

    Args:
        context: what was asked for, and where to write.

    Raises:
        CheckpointError: the executors wrote to a place that the driver does not see.
    """
    settings = context.settings
    model = load_model(str(settings.model), settings.trust or (), context.spark)
    with settings.rows.read(settings.source, context.spark) as rows:
        started = time.perf_counter()
        wanted = settings.rows.where(rows, settings.rows.predict)
        many = _write(model.transform(wanted), settings.write, context.target)
    location = locate(context.target)
    there = location.files.get_file_info(fs.FileSelector(location.path, allow_not_found=True))
    if many and not any(_is_data(info.base_name) for info in there):
        raise CheckpointError(
            f"the executors wrote {many:,} predictions, but the driver sees no file in "
            f"{settings.output}: the path is local to each host. Give one that all hosts share, "
            "such as hdfs:// or s3a://"
        )
    logs.say(f"{many:,} predictions", started, rows=many)
    result = {"model": settings.model, "rows": many}
    return JobOutput(result, f"\nPredictions saved in {settings.output}")


def _is_data(name: str) -> bool:
    """Whether Spark's readers take a name for rows, as they do with folders like ``_day=1``."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name)


def _write(predictions: DataFrame, table: TableFormat, target: str) -> int:
    """Write the table, and count its rows along the way."""
    if table.columns is not None:
        predictions = predictions.select(*table.columns)
    counted = Observation()
    predictions = predictions.observe(counted, F.count(F.lit(1)).alias("rows"))
    if table.files is not None:
        predictions = predictions.coalesce(table.files)
    writer = predictions.write.format(table.format).options(**(table.options or {}))
    if table.partition_by:
        writer = writer.partitionBy(*table.partition_by)
    writer.save(target)
    return int(counted.get["rows"])
