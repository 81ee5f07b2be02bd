"""``sparkdl-prepare``: lets Spark sessions on this machine start faster."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.errors import SetupError
from sparkdl.spark.catalyst.jvm import process_of_jvm
from sparkdl.spark.catalyst.versions import table_of
from sparkdl.spark.session.session import (
    DEFAULTS,
    DRIVER_OPTIONS,
    EXECUTOR_OPTIONS,
    archive_option,
    archive_path,
    create_session,
    find_java,
)

DEADLINE_S = 300.0
"""Seconds for writing the archive after its job, which takes some 10 s of processor time."""


def main(arguments: list[str] | None = None) -> None:
    """Write the archive where ``create_session`` looks for it, and print its other uses.

    Raises:
        SetupError: there is no Java, or it writes no archive in time.
    """
    parser = argparse.ArgumentParser(prog="sparkdl-prepare", description=__doc__)
    parser.parse_args(arguments)
    path = archive_path(find_java())
    write_class_archive(path)
    driver, executor = (
        f"{name}  {DEFAULTS[name]} {archive_option(path)}\n"
        for name in (DRIVER_OPTIONS, EXECUTOR_OPTIONS)
    )
    sys.stdout.write(
        f"Wrote {path} ({path.stat().st_size / 1e6:.0f} MB).\n"
        "Sessions of sparkdl.create_session on this machine use it from now on. For those that\n"
        "others create, and for executors on machines that have the same file, Java and Spark, in\n"
        f"spark-defaults.conf:\n\n{driver}{executor}"
    )


def write_class_archive(path: Path) -> None:
    """Run a small Spark job in a JVM that keeps the classes it loaded.

    Args:
        path: the archive; replaced once the new one is whole.

    Raises:
        SetupError: Java wrote none in time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / "classes.jsa"
        code = _run_job(written, Path(folder) / "rows")
        if not written.exists():
            raise SetupError(
                f"Java wrote no class archive to {written} (it ended with {code}). It must be a "
                "HotSpot JVM of version 17 or later with its own archive, which `java "
                "-Xshare:dump`, run as the owner of its installation, creates"
            )
        os.replace(written, path)


def _run_job(archive: Path, rows: Path) -> int:
    """Use the parts of Spark that a fit uses, all in the driver's JVM; return its exit code.

    Raises:
        SetupError: it did not exit.
    """
    options = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable -Xlog:all=error:stderr"
    spark = create_session(
        "sparkdl-prepare",
        master="local[2]",
        conf={DRIVER_OPTIONS: f"{DEFAULTS[DRIVER_OPTIONS]} {options}", "spark.ui.port": "0"},
    )
    java = process_of_jvm()
    try:
        try:
            _use(spark, str(rows))
        finally:
            spark.stop()
        java.stdin.close()  # tells pyspark's JVM that it is no longer needed
        return int(java.wait(DEADLINE_S))
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"Java was still writing the class archive {DEADLINE_S:g} s after its job, and was "
            f"stopped. Is this machine busy, or {archive.parent} on a slow disk?"
        ) from error
    finally:
        java.kill()
        java.wait()


def _use(spark: SparkSession, path: str) -> None:
    """Write and read files, join, shuffle, aggregate, and hand rows to Python and back."""
    features = ["id", "id % 2 AS label", "array(cast(id AS float), 1.0f) AS features"]
    spark.range(1000).selectExpr(*features).write.parquet(path)
    frame = spark.read.parquet(path).where("id >= 0").join(spark.range(1000), "id")
    for barrier in (False, True):
        handed = frame.repartition(2).mapInArrow(_same, frame.schema, barrier=barrier)
        table_of(handed.groupBy("label").count())


def _same(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches
