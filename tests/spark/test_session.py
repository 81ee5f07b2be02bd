"""Sessions that create_session starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from subprocesses import printed_by, run_python

from sparkdl import create_session
from sparkdl.errors import ConfigError, SetupError
from sparkdl.spark.session import find_java


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match=f"JAVA_HOME is {tmp_path}.*unset it"):
        find_java()


def test_java_home_or_java_on_the_path_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    find_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    find_java()


def test_create_session_in_a_process_without_java_fails_with_the_fix_and_no_stack_of_the_jvm(
    tmp_path: Path,
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_HOME")}
    environment["PATH"] = str(tmp_path)
    done = run_python(
        "-c", "import sparkdl; sparkdl.create_session('app', 'local[1]')", env=environment
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sparkdl.errors.SetupError: Spark needs Java 17 or 21")
    assert "apt-get install openjdk-17" in last
    assert "JAVA_GATEWAY_EXITED" not in done.stderr


def test_a_server_has_a_master_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"master='local' .* remote='sc://there' .* one of them"):
        create_session(master="local", remote="sc://there")


def test_a_client_without_its_packages_is_told_which_to_install(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('No module named grpc')")
    done = run_python(
        "-c",
        "import sparkdl; sparkdl.create_session(remote='sc://there')",
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sparkdl.errors.SetupError: ")
    assert last.endswith("pip install 'sparkdl-torch[connect]' has all of them")


def test_a_second_session_is_the_first_and_executors_run_the_drivers_python(
    spark: SparkSession,
) -> None:
    assert create_session("another").sparkContext is spark.sparkContext
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_session_that_is_there_keeps_its_settings_but_for_those_given(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    name, timezone = "spark.sql.execution.arrow.pyspark.enabled", "spark.sql.session.timeZone"
    key = "spark.executor.memory"
    kept = {each: spark.conf.get(each) for each in (name, timezone, "spark.app.name")}
    spark.conf.set(name, "false")
    try:
        create_session("another")
        assert spark.conf.get(name) == "false"
        create_session("another", conf={timezone: "Asia/Tokyo", key: "7g"})
        assert (spark.conf.get(timezone), spark.conf.get(name)) == ("Asia/Tokyo", "false")
        assert spark.conf.get("spark.app.name") == kept["spark.app.name"]
        assert f"{key} has no effect" in caplog.text
    finally:
        for each in (name, timezone):
            spark.conf.set(each, kept[each])


def test_another_python_than_that_of_a_session_that_is_there_has_no_effect_and_is_said(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.environ["PYSPARK_PYTHON"]
    create_session("another", conf={"spark.pyspark.python": before + "3"})
    assert "spark.pyspark.python has no effect" in caplog.text
    assert os.environ["PYSPARK_PYTHON"] == before


def command_line(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_the_driver_and_the_executors_compile_hot_code_later(spark: SparkSession) -> None:
    option = "-XX:Tier4CompileThreshold=150000"
    driver = spark._jvm.java.lang.ProcessHandle.current()
    executors = [
        child
        for child in driver.descendants().toArray()
        if "CoarseGrainedExecutorBackend" in command_line(child.pid())
    ]
    assert option in command_line(driver.pid())
    assert [option in command_line(executor.pid()) for executor in executors] == [True] * 3


@pytest.mark.gate
def test_java_options_and_a_python_of_ones_own_count_and_the_compiler_comes_beside_java() -> None:
    settings = {
        "spark.driver.extraJavaOptions": "-Dmine=1",
        "spark.ui.enabled": "false",
        "spark.pyspark.python": "/opt/other/python",
    }
    script = (
        f"import torch, sparkdl; spark = sparkdl.create_session('app', 'local[1]', {settings!r}); "
        "import sys; print('torch._dynamo.eval_frame' in sys.modules); "
        "java = spark._jvm.java.lang; print(java.System.getProperty('mine')); "
        "print(*java.management.ManagementFactory.getRuntimeMXBean().getInputArguments()); "
        "import os; print(spark.sparkContext.pythonExec, os.environ['PYSPARK_PYTHON']); "
        "spark.stop()"
    )
    printed = printed_by("-c", script)
    compiler_is_there, mine, arguments, pythons = printed.splitlines()[-4:]
    assert (compiler_is_there, mine) == ("True", "1")
    assert pythons == f"/opt/other/python {os.environ.get('PYSPARK_PYTHON', sys.executable)}"
    assert "-XX:Tier4CompileThreshold=" in arguments


@pytest.mark.nightly
def test_an_archive_that_is_not_there_is_named_with_the_setting_and_the_fix() -> None:
    settings = {"spark.archives": "nowhere/environment.tar.gz#environment"}
    script = f"import sparkdl; sparkdl.create_session('app', 'local[1]', {settings!r})"
    done = run_python("-c", script)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "sparkdl.errors.SetupError: Spark cannot send nowhere/environment.tar.gz"
    )
    assert "spark.archives (--archives of spark-submit) names it" in last
    assert f"relative to {Path.cwd()}" in last


OLD_SPARK = """
import sparkdl
told = {}
for name in sparkdl.__all__:
    try:
        getattr(sparkdl, name)
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
print(len(told), *set(told.values()), sep="\\n")
print("TorchEstimator" in told, "LAMB" in told)
"""


@pytest.mark.gate
def test_spark_3_4_is_refused_by_every_name_that_needs_spark(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("__version__ = '3.4.4'")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    count, *told, which = printed_by("-c", path + OLD_SPARK).splitlines()
    assert int(count) >= 10
    assert len(told) == 1
    found = f"3.4.4 ({tmp_path}/pyspark): "
    words = f"SetupError: sparkdl needs Spark 3.5 or newer, and this is Spark {found}"
    assert told[0].startswith(words)
    assert which == "True False"
