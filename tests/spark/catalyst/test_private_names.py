"""One room alone uses private names of Spark, and does without them where they are missing."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frames import frame, in_files
from missing_names import lacking
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkdl
from sparkdl.spark.catalyst import cluster
from sparkdl.spark.catalyst.array_bytes import array_bytes
from sparkdl.spark.catalyst.jvm import with_fallback
from sparkdl.spark.catalyst.plans import has_stable_order, in_partitions, planned
from sparkdl.spark.cluster.slots import choose_num_workers

ROOT = Path(sparkdl.__file__).parent
PRIVATE = {
    *("_jvm", "_jdf", "_jsparkSession", "_jsc", "_gateway", "_jrdd", "_jc", "_jbroadcast", "_sc"),
    *("_active_spark_context", "_root_directory", "_is_running_on_worker", "_setTaskContext"),
    *("_transfer_params_to_java", "_java_resource_profile"),
}
PRIVATE_MODULES = ("pyspark.core", "pyspark.find_spark_home", "pyspark.sql.pandas")


def private_names(path: Path) -> list[str]:
    """The private names of PySpark that a module uses, but for what subclasses of its ML may."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyspark"):
            hidden = [each.name for each in node.names if each.name.startswith("_")]
            if hidden or str(node.module).startswith(PRIVATE_MODULES):
                found.append(f"{node.lineno}: {node.module} {hidden}")
    return found


def test_nothing_else_touches_private_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT / "spark/catalyst"
        for name in private_names(path)
    ]
    assert wrong == [], "move these into functions of sparkdl/spark/catalyst:\n" + "\n".join(wrong)


@pytest.mark.versions
def test_this_version_of_spark_has_all_private_names(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that lacks one is slower, or shuffles: see docs/versions.md."""
    files = in_files(frame(spark, 60, 3), tmp_path / "table")
    context = spark.sparkContext
    choose_num_workers(spark, 3)  # waits for the executors
    with caplog.at_level(logging.INFO, "sparkdl"):
        rows, found = planned(files)
        assert found == files.rdd.getNumPartitions()
        assert has_stable_order(files)
        assert array_bytes(spark) is not None
        for partitions in (2, 7):
            assert in_partitions(rows, partitions).rdd.getNumPartitions() == partitions
        assert len(cluster.executor_start_times(spark)) == 3
        assert cluster.count_slots(spark) == 3
        assert cluster.count_running_tasks(spark) == 0
        assert cluster.failed_tasks(context, 0) == []
        assert cluster.jobs_with_tag(context, "x", "y") == []
        assert not cluster.feeds_a_shuffle(context, 0)
    assert [line for line in caplog.messages if "this Spark lacks" in line] == []


def test_a_scheduler_that_is_not_asked_is_counted_by_cores_and_stages(spark: SparkSession) -> None:
    context = spark.sparkContext
    choose_num_workers(spark, 3)  # waits for the executors
    asked = [cluster.count_slots(spark), cluster.count_running_tasks(spark)]
    missing = ("maxNumConcurrentTasks", "runningTasksByExecutors", "executorList", "taskList")
    with lacking(*missing, "getJobIdsForTag", "stageIdToStage"):
        assert [cluster.count_slots(spark), cluster.count_running_tasks(spark)] == asked
        assert cluster.executor_start_times(spark) == []
        assert cluster.failed_tasks(context, 0) == []
        assert cluster.jobs_with_tag(context, "x", "y") == []
        assert not cluster.feeds_a_shuffle(context, 0)


def test_jobs_are_found_by_their_group_where_there_are_no_tags(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("of the test", "")
    try:
        spark.range(1).collect()
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    with lacking("getJobIdsForTag"):
        assert len(cluster.jobs_with_tag(context, "none", "of the test")) == 1


def test_only_a_name_that_is_missing_is_done_without(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    jvm: Any = spark._jvm

    @with_fallback(lambda use: "plain")
    def private(use: Callable[[], object]) -> object:
        return use()

    for missing in (
        lambda: spark._no_such_name,  # type: ignore[attr-defined]
        lambda: spark._jsparkSession.noSuchMethod(),
        lambda: jvm.org.apache.spark.NoSuchClass(),
        lambda: raised(
            Py4JError("py4j.security.Py4JSecurityException: Method x is not whitelisted")
        ),
    ):
        assert private(missing) == "plain"
    said = [line for line in caplog.messages if line.startswith("private does without")]
    assert len(said) == len(set(said)) == 4
    private(lambda: spark._no_such_name)  # type: ignore[attr-defined]
    assert len(caplog.messages) == 4
    for wrong in (
        lambda: spark.range(1).select(F.raise_error(F.lit("mine"))).collect(),
        lambda: ROOT.no_such_name,  # type: ignore[attr-defined]
        lambda: len(1),  # type: ignore[arg-type]
        lambda: raised(Py4JError("Answer from Java side is empty")),
    ):
        with pytest.raises((AttributeError, TypeError, Py4JError, PySparkException)):
            private(wrong)


def raised(error: Exception) -> None:
    raise error
