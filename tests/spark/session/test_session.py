"""Sessions that create_session starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from subprocesses import printed_by, run_python

from sparkdl import create_session
from sparkdl.errors import ConfigError, SetupError
from sparkdl.spark.session import prepare
from sparkdl.spark.session import session as sessions
from sparkdl.spark.session.prepare import write_class_archive
from sparkdl.spark.session.session import (
    DRIVER_OPTIONS,
    EXECUTOR_OPTIONS,
    archive_path,
    archive_settings,
    find_java,
)


def test_without_java_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"Java 17 or 21.*apt-get install openjdk-17"):
        find_java()


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
    assert "apt-get install" in last
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


def command_line(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a Java, a Spark of one jar, and nothing prepared."""
    for folder in ("java/bin", "spark/jars"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "java/bin/java").touch()
    (tmp_path / "java/release").write_text('JAVA_VERSION="17.0.15"\n')
    (tmp_path / "spark/jars/spark-core.jar").write_text("core")
    monkeypatch.setattr(sessions, "directory_of_spark", lambda: tmp_path / "spark")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def java_of(home: Path) -> Path:
    return home / "java/bin/java"


def prepared(home: Path) -> Path:
    path = archive_path(java_of(home))
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_only_a_local_clusters_executors_are_told_of_an_archive_that_is_there(home: Path) -> None:
    """Others may be elsewhere."""
    assert archive_settings(java_of(home), "local-cluster[2,1,1024]") == {}
    option = f"-XX:SharedArchiveFile={prepared(home)}"
    assert archive_settings(java_of(home), "local-cluster[2,1,1024]") == {
        DRIVER_OPTIONS: option,
        EXECUTOR_OPTIONS: option,
    }
    for master in (None, "local[2]", "yarn", "spark://there:7077"):
        assert set(archive_settings(java_of(home), master)) == {DRIVER_OPTIONS}, master


def test_an_upgrade_asks_for_a_new_archive(home: Path) -> None:
    prepared(home)
    jar, java = home / "spark/jars/spark-core.jar", home / "java/release"
    assert archive_settings(java_of(home), "local[2]")
    names = {archive_path(java_of(home))}
    for change in (
        lambda: java.write_text('JAVA_VERSION="17.0.16"\n'),
        lambda: jar.write_text("another core"),
        lambda: (home / "spark/jars/extra.jar").write_text(""),
        lambda: os.utime(jar, (0, 0)),
    ):
        change()
        assert archive_settings(java_of(home), "local[2]") == {}
        names.add(archive_path(java_of(home)))
    assert len(names) == 5


def test_a_java_that_writes_no_archive_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.spark.session.prepare._run_job", lambda written, rows: 1)
    with pytest.raises(SetupError, match=r"no class archive.*\(it ended with 1\).*HotSpot"):
        write_class_archive(tmp_path / "cache" / "classes.jsa")
    assert list((tmp_path / "cache").iterdir()) == []


class Session:
    """Of a JVM that ends when its input does, but takes its time: a process that sleeps."""

    def __init__(self) -> None:
        self.java = subprocess.Popen(["sleep", "120"], stdin=subprocess.PIPE)

    def stop(self) -> None: ...


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    created = Session()
    monkeypatch.setattr(prepare, "create_session", lambda *_, **__: created)
    monkeypatch.setattr(prepare, "process_of_jvm", lambda: created.java)
    monkeypatch.setattr(prepare, "_use", lambda spark, path: None)
    return created


def test_a_java_that_is_not_done_in_time_is_ended_and_named(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "DEADLINE_S", 0.05)
    with pytest.raises(SetupError, match=r"still writing the class archive 0\.05 s after its job"):
        write_class_archive(tmp_path / "cache" / "classes.jsa")
    assert session.java.poll() == -signal.SIGKILL
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_job_that_fails_leaves_no_java_behind(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spark: Session, path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(prepare, "_use", fail)
    with pytest.raises(OSError, match="no space left"):
        write_class_archive(tmp_path / "classes.jsa")
    assert session.java.poll() == -signal.SIGKILL


SESSION = """
from sparkdl import create_session
log = "-Xlog:class+load:file={log}"
spark = create_session("test", "local[1]", {{"spark.driver.extraJavaOptions": log}})
assert spark.range(3).count() == 3
"""


@pytest.mark.nightly
def test_sessions_of_a_prepared_machine_map_sparks_classes(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    run = partial(printed_by, env=environment, timeout=170)
    said = run("-c", "from sparkdl.spark.session.prepare import main; main([])")
    (archive,) = (tmp_path / "sparkdl").iterdir()
    for_others = [line.split(maxsplit=1) for line in said.splitlines()[-2:]]
    assert [name for name, _ in for_others] == [DRIVER_OPTIONS, EXECUTOR_OPTIONS]
    assert all(line.endswith(f"-XX:SharedArchiveFile={archive}") for _, line in for_others)
    log = tmp_path / "classes.txt"
    run("-c", SESSION.format(log=log))
    loaded = [line for line in log.read_text().splitlines() if " org.apache.spark." in line]
    mapped = sum(line.endswith("source: shared objects file (top)") for line in loaded)
    from_jars = sum("source: file:" in line or "source: jar:" in line for line in loaded)
    assert mapped > 2000
    assert from_jars < 0.1 * mapped
