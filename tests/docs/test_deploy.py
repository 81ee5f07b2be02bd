"""The settings and options by which the pages have people deploy are ones that Spark knows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/deploy.md"
OURS = "spark.sparkdl."
# Spark completes these with a name of the user's own.
FAMILIES = ("spark.yarn.appMasterEnv.", "spark.executor.resource.", "spark.task.resource.")
CLASSES = (
    "org.apache.spark.internal.config.package$",
    "org.apache.spark.internal.config.Python$",
    "org.apache.spark.internal.config.UI$",
    "org.apache.spark.deploy.k8s.Config$",
    "org.apache.spark.deploy.yarn.config.package$",
    "org.apache.spark.sql.internal.SQLConf$",
)
"""Whose settings Spark registers when it loads them."""


def named_settings() -> set[str]:
    text = PAGE.read_text() + (ROOT / "conf/spark-defaults.conf").read_text()
    return {name.rstrip(".") for name in re.findall(r"\bspark\.[a-zA-Z]+\.[a-zA-Z0-9.]+", text)}


def test_every_setting_that_is_named_is_one_of_sparks(spark: SparkSession) -> None:
    jvm = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in CLASSES:
        jvm.java.lang.Class.forName(name, True, loader)
    entries = jvm.org.apache.spark.internal.config.ConfigEntry
    named = {name for name in named_settings() if not name.startswith((OURS, *FAMILIES))}
    assert len(named) > 20
    assert {name for name in named if entries.findEntry(name) is None} == set()


def test_every_option_of_a_command_is_one_of_spark_submit() -> None:
    submit = Path(_find_spark_home(), "bin/spark-submit")
    done = subprocess.run(
        [submit, "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    known = set(re.findall(r"--[a-z-]+", done.stdout + done.stderr))
    commands = re.findall(r"spark-submit (.*?\.py)", PAGE.read_text(), re.DOTALL)
    options = {name for command in commands for name in re.findall(r"--[a-z-]+", command)}
    assert len(commands) == 4
    assert {"--archives", "--deploy-mode", "--num-executors", "--files"} <= options <= known
