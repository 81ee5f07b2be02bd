"""What ran before leaves nothing that the next run, or the next fit, would feel."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from frames import CLASSES, WIDTH, estimator, frame, same_bits
from pyspark.sql import SparkSession
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def write(path: Path, text: str, when: int = 0) -> None:
    """Python tells a changed file by its size and the second in which it was written."""
    path.write_text(text)
    os.utime(path, (1_000_000_000 + when,) * 2)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank 0] ")]


@pytest.mark.gate
def test_a_module_beside_a_script_that_was_edited_is_new_in_the_next_run(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.py", "import helper_of_guests; print(helper_of_guests.SAYS)")
    for number, text in enumerate(("one", "two")):
        write(tmp_path / "helper_of_guests.py", f"SAYS = '{text}'", number)
        sparkdl.run(str(tmp_path / "train.py"), num_workers=2)
        assert shown(capsys) == [f"[rank 0] {text}"]


@pytest.mark.gate
def test_each_projects_module_is_its_own(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.py", "import model_of_guests; print(model_of_guests.SAYS)")
        write(tmp_path / name / "model_of_guests.py", f"SAYS = {name!r}")
        sparkdl.run(str(tmp_path / name / "train.py"), num_workers=2)
        assert shown(capsys) == [f"[rank 0] {name}"]


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
        "pid": os.getpid(),
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
    first = sparkdl.run(look_around_and_leave_a_mess, num_workers=3)
    second = sparkdl.run(look_around, num_workers=3)
    assert len({each.pop("pid") for each in [*first, *second]}) == 6
    assert [*first, *second] == [first[0]] * 6
    assert first[0]["dtype"] == "torch.float32"
    assert first[0]["gradients"]


@pytest.mark.gate
def test_random_numbers_are_not_those_of_the_run_before(spark: SparkSession) -> None:
    """But for torch's, which begin at the same one in every process."""

    def draw() -> tuple[float, float]:
        import random

        import numpy as np

        return random.random(), np.random.rand()

    drawn = [*sparkdl.run(draw, num_workers=2), *sparkdl.run(draw, num_workers=2)]
    assert len({value for pair in drawn for value in pair}) == 8


@pytest.mark.gate
def test_logging_that_is_set_up_by_every_run_is_shown_in_every_run(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("guest").warning("said")

    for _ in range(2):
        sparkdl.run(train, num_workers=1)
        assert shown(capsys) == ["[rank 0] said"]


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
