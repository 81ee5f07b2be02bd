"""Ranks that take unequal steps, or end on their own, end the run in words instead of a hang."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest
import torch
from pyspark.sql import SparkSession
from waiting import eventually

import sparkdl
from sparkdl.errors import TrainingError, WorkerError, WorkerLostError
from sparkdl.spark.functions import serving

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEPT: list[object] = []


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.slow_variants
def test_a_rank_that_takes_fewer_steps_ends_the_exchanges_of_the_others(
    spark: SparkSession, early: int
) -> None:
    """Also where a module of the user's holds on to what holds the process group."""

    def train() -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        sys.modules["kept"] = DistributedDataParallel(torch.nn.Linear(2, 1))  # type: ignore[assignment]
        for _ in range(3 if dist.get_rank() == early else 5):
            dist.all_reduce(torch.ones(1000))

    with pytest.raises(WorkerError) as caught:
        sparkdl.run(train, num_workers=2)
    late = 1 - early
    assert f"rank {early} had returned when an exchange failed on rank {late}" in str(caught.value)
    assert "all ranks must take the same number of steps" in str(caught.value)
    assert caught.value.rank == late


@pytest.mark.slow
def test_a_rank_that_still_runs_after_the_others_have_returned_is_named_with_its_place(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(serving, "RETURNED_S", 1.0)
    path = str(tmp_path / "told")

    def validate_slowly() -> int:
        until = time.monotonic() + 120
        while sparkdl.current_worker().rank == 0 and time.monotonic() < until:
            if os.path.exists(path):
                break
            time.sleep(0.1)
        return sparkdl.current_worker().rank

    def release() -> None:
        assert eventually(lambda: "in validate_slowly" in caplog.text, 120)
        Path(path).touch()

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, logger="sparkdl"):
        released = pool.submit(release)
        assert sparkdl.run(validate_slowly, num_workers=2) == [0, 1]
        released.result()
    told = [r.getMessage() for r in caplog.records if "still running" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("rank 1 already returned; rank 0 is still running, in File ")
    assert "in validate_slowly" in told[0]


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.slow_variants
def test_a_rank_that_waits_to_save_with_one_that_has_returned_is_an_error(
    spark: SparkSession, tmp_path: Path, early: int
) -> None:
    def train() -> None:
        if sparkdl.current_worker().rank != early:
            sparkdl.current_worker().save_checkpoint(str(tmp_path), {"epoch": 1})

    with pytest.raises(
        TrainingError, match=f"rank {1 - early} would wait .* but rank {early} already returned"
    ):
        sparkdl.run(train, num_workers=2)


def leave() -> None:
    os._exit(0)


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (leave, r"exited with code 0 .*os\._exit"),
        (crash, "was ended by SIGSEGV"),
    ],
)
def test_a_process_that_ends_by_itself_is_told_as_it_was(
    spark: SparkSession, end: Callable[[], None], words: str
) -> None:
    def train() -> None:
        if sparkdl.current_worker().rank == 1:
            end()

    with pytest.raises(WorkerLostError, match=f"(?s)rank 1 on .*{words}") as caught:
        sparkdl.run(train, num_workers=2)
    assert "memory" not in str(caught.value)


@pytest.mark.slow
def test_relative_paths_begin_in_the_drivers_directory_on_every_rank(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def resume() -> tuple[str, bool]:
        return os.getcwd(), Path("snapshot.pt").exists()

    assert sparkdl.run(resume, num_workers=2) == [(str(tmp_path), False)] * 2
    (tmp_path / "snapshot.pt").touch()
    assert sparkdl.run(resume, num_workers=2) == [(str(tmp_path), True)] * 2
    (tmp_path / "other").mkdir()
    assert sparkdl.run(resume, num_workers=2, cwd="other") == [(str(tmp_path / "other"), False)] * 2
    with pytest.raises(WorkerError, match=r"cwd='.*nowhere' is not a directory that rank [01] on"):
        sparkdl.run(resume, num_workers=2, cwd="nowhere")
