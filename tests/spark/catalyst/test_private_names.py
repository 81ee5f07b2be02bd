"""One room alone uses private names of Spark, and does without them where they are missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from missing_names import lacking
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkdl
from sparkdl.spark.catalyst import cluster
from sparkdl.spark.catalyst.jvm import with_fallback
from sparkdl.spark.cluster.slots import choose_num_workers

ROOT = Path(sparkdl.__file__).parent
PRIVATE = {"_jvm", "_jdf", "_jsparkSession", "_jsc", "_gateway", "_jrdd", "_jc"}


def test_nothing_else_touches_private_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT / "spark/catalyst"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE
    ]
    assert wrong == [], "move these into functions of sparkdl/spark/catalyst:\n" + "\n".join(wrong)


def test_a_scheduler_that_is_not_asked_is_counted_by_cores_and_stages(spark: SparkSession) -> None:
    context = spark.sparkContext
    choose_num_workers(spark, 3)  # waits for the executors
    asked = [cluster.count_slots(spark), cluster.count_running_tasks(spark)]
    missing = ("maxNumConcurrentTasks", "runningTasksByExecutors", "executorList", "taskList")
    with lacking(*missing, "getJobIdsForTag", "stageIdToStage"):
        assert [cluster.count_slots(spark), cluster.count_running_tasks(spark)] == asked
        assert cluster.executor_start_times(spark) == []
        assert cluster.failed_tasks(context, 0) == []
        assert cluster.jobs_with_tag(context, "x") == []
        assert not cluster.feeds_a_shuffle(context, 0)


def test_only_a_name_that_is_missing_is_done_without(spark: SparkSession) -> None:
    @with_fallback(lambda column: "plain")
    def private(column: object) -> str:
        spark.range(1).select(column).collect()  # type: ignore[call-overload]
        raise Py4JError("name does not exist in the JVM")

    assert private("id") == "plain"
    with pytest.raises(Exception, match="mine"):
        private(F.raise_error(F.lit("mine")))
