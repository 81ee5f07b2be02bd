"""What one run leaves to the next, and scripts that are sent."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from frames import CLASSES, WIDTH, estimator, frame, same_bits
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl.spark.functions.program import Script, run_script

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank 0] ")]


def look_around() -> dict[str, Any]:
    """What a program may depend on."""
    return {
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variable": os.environ.get("LEFT_BY_A_RUN"),
        "directory": os.getcwd(),
        "warnings": len(warnings.filters),
        "handlers": len(logging.getLogger().handlers),
        "path": "/left" in sys.path,
        "arguments": sys.argv[1:],
        "groups": torch.distributed.is_initialized(),
        "module": "left_by_a_run" in sys.modules,
        "own": [os.getpid(), random.random(), np.random.rand()],
    }


def look_around_and_leave_a_mess() -> dict[str, Any]:
    found = look_around()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BY_A_RUN"] = "yes"
    os.chdir("/")
    warnings.simplefilter("ignore")
    logging.basicConfig()
    sys.path.insert(0, "/left")
    sys.argv.append("left")
    sys.modules["left_by_a_run"] = logging
    torch.distributed.init_process_group("gloo")
    return found


@pytest.mark.gate
def test_a_run_finds_nothing_of_the_run_before(spark: SparkSession) -> None:
    """So logging that every run sets up is set up in every run."""
    first = sparkdl.run(look_around_and_leave_a_mess, num_workers=3)
    second = sparkdl.run(look_around, num_workers=3)
    # Of torch's random numbers all processes have the same.
    assert len({value for each in [*first, *second] for value in each.pop("own")}) == 18
    assert [*first, *second] == [first[0]] * 6
    assert first[0]["dtype"] == "torch.float32"
    assert first[0]["gradients"]


@pytest.mark.nightly
def test_what_a_program_does_at_its_end_is_done_and_shown(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        import atexit
        import threading
        import time

        atexit.register(print, "at exit")
        threading.Thread(target=lambda: time.sleep(0.3) or print("saved")).start()

    sparkdl.run(train, num_workers=1)
    assert shown(capsys) == ["[rank 0] saved", "[rank 0] at exit"]


def in_every_process(
    spark: SparkSession, dtype: torch.dtype, gradients: bool, deterministic: bool
) -> list[Any]:
    """Set torch, as a foreign job does, in Spark's reused Python processes; returns how it was."""

    def leave(_: Any) -> Any:
        yield str(torch.get_default_dtype()), torch.is_grad_enabled()
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(deterministic)

    everywhere = spark.sparkContext.parallelize(range(3), 3).barrier()
    found: list[Any] = everywhere.mapPartitions(leave).collect()
    return found


@pytest.fixture
def in_dirty_processes(spark: SparkSession) -> Iterator[None]:
    in_every_process(spark, torch.float64, False, True)
    yield
    found = in_every_process(spark, torch.float32, True, False)
    assert found == [("torch.float64", False)] * 3  # what was another job's is as that left it


@pytest.mark.gate
def test_a_fit_computes_with_the_drivers_settings_whatever_another_job_has_left(
    spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    fits = estimator(model=partial(nn.Linear, WIDTH, CLASSES), numWorkers=3)
    clean = fits.fit(frame(spark))
    predicted = clean.transform(frame(spark)).select("id", "prediction").collect()
    request.getfixturevalue("in_dirty_processes")
    dirty = fits.fit(frame(spark))
    assert same_bits(clean, dirty)
    assert dirty.transform(frame(spark)).select("id", "prediction").collect() == predicted


TELLS = b"""
import sys
from pathlib import Path
Path(sys.argv[1]).write_text(f"{__name__} {sys.argv[2:]} {__file__} {sys.path[0]}")
"""


def told_by(script: Script, tmp_path: Path) -> list[str]:
    """Its name, arguments, file and directory, as it wrote them down."""
    out = tmp_path / "told"
    out.unlink(missing_ok=True)
    run_script(script, [str(out), "x"])
    return out.read_text().split(" ")


def test_a_script_that_is_there_as_it_was_sent_runs_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(TELLS)
    expected = ["__main__", "['x']", str(path), str(tmp_path)]
    assert told_by(Script(str(path), TELLS), tmp_path) == expected
    assert caplog.text == ""


def test_another_script_at_the_same_path_is_not_run_but_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("raise LookupError('not sent')")
    for there in (b"", TELLS.replace(b"x", b"y"), TELLS + b"\n", b"\xff" * 9):
        caplog.clear()
        path.write_bytes(there)
        name, arguments, file, folder = told_by(Script(str(path), TELLS), tmp_path)
        assert (name, arguments, Path(file).name) == ("__main__", "['x']", "train.py")
        assert Path(file).parent == Path(folder) != tmp_path
        assert not Path(folder).exists()
        assert f"{path} on " in caplog.text
        assert "differs from the driver's" in caplog.text


def test_a_script_that_is_not_there_runs_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").mkdir()
    for path in ("elsewhere/train.py", "train.py"):
        assert told_by(Script(str(tmp_path / path), TELLS), tmp_path)[0] == "__main__"
    assert caplog.text == ""


def test_a_script_keeps_its_own_encoding(tmp_path: Path) -> None:
    check = b"assert name == chr(233)\n"
    for heading, encoding in (("# coding: latin-1\n", "latin-1"), ("", "utf-8")):
        source = f"{heading}name = 'é'\n".encode(encoding)
        run_script(Script(str(tmp_path / "train.py"), source + check), [])


def test_a_script_in_a_directory_that_may_not_be_entered_runs_as_it_was_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert told_by(Script(str(tmp_path / "home" / "train.py"), TELLS), tmp_path)[0] == "__main__"
    assert "cannot be read" in caplog.text


def test_nothing_of_a_script_is_left_in_the_process(tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    with pytest.raises(SystemExit):
        run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.path.clear(); sys.exit(3)"), [])
    run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.exit(0)"), [])
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
