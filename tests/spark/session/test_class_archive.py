"""The archive of Spark's classes: what it is called, who is told of it, and that Java reads it."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from subprocesses import printed_by

from sparkdl.errors import SetupError
from sparkdl.spark.session import prepare
from sparkdl.spark.session import session as sessions
from sparkdl.spark.session.prepare import write_class_archive
from sparkdl.spark.session.session import (
    DRIVER_OPTIONS,
    EXECUTOR_OPTIONS,
    archive_path,
    archive_settings,
)


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


@pytest.mark.slow
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
