"""Workers and drivers that are killed at random points change no bit of the output."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_transform_volume import CHUNK, SIZES, image, model_of, read
from test_volume_stores import stored
from volume_case import Dies, Edges
from waiting import eventually

from sparkdl import TorchModel

SEEDS = [1, 2]
PASSES = 150
"""Fewer than the model makes in all."""
DRIVER = """
import sys
import torch
import sparkdl
from volume_case import Edges

spark = sparkdl.create_session(
    "driver",
    master="local-cluster[2,1,1024]",
    conf={"spark.executor.memory": "1024m", "spark.ui.enabled": "false"},
)
model = sparkdl.TorchModel.from_module(Edges(), torch.zeros(1, 1, 6, 8, 8), predictBatchSize=1)
source, target = sys.argv[1:]
model.transform_volume(
    source, target, patch=(6, 8, 8), overlap=(2, 4, 4), chunk=(2, 8, 28), progress=False
)
"""

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("spark")]


def one_by_one(module: Edges) -> TorchModel:
    return model_of(module, predictBatchSize=1)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return stored(tmp_path / "in.zarr", image())


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_are_killed_change_no_bit(tmp_path: Path, source: str, seed: int) -> None:
    one_by_one(Edges()).transform_volume(source, tmp_path / "whole", chunk=CHUNK, **SIZES)
    folder = tmp_path / "passes"
    folder.mkdir()
    deaths = random.Random(seed).sample(range(10, PASSES), 3)  # a task may fail three times
    dying = Dies(folder, deaths)
    # The first passes are trials in the driver.
    done = one_by_one(dying).transform_volume(source, tmp_path / "out", chunk=CHUNK, **SIZES)
    assert len(list(folder.iterdir())) > max(deaths)
    assert done.computed == 6
    assert np.array_equal(read(tmp_path / "out"), read(tmp_path / "whole"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_driver_that_is_killed_goes_on_and_changes_no_bit(
    tmp_path: Path, source: str, seed: int
) -> None:
    chunk = (2, 8, 28)
    model = one_by_one(Edges())
    whole = model.transform_volume(source, tmp_path / "whole", chunk=chunk, **SIZES)
    target = tmp_path / "out"
    roots = [*map(str, (Path(__file__).parents[2], Path(__file__).parent))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    wanted = random.Random(seed).randrange(1, whole.chunks - 2)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, source, str(target)], env=environment, start_new_session=True
    )
    try:
        marked = lambda: len(list(target.glob(".sparkdl/chunks/*[0-9]")))  # noqa: E731
        assert eventually(lambda: marked() >= wanted or driver.poll() is not None, 600)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # the executors too
        driver.wait()
    before = marked()
    done = model.transform_volume(source, target, chunk=chunk, **SIZES)
    assert done.chunks == whole.chunks
    assert done.computed <= whole.chunks - wanted
    assert before >= wanted
    assert np.array_equal(read(target), read(tmp_path / "whole"))
    assert torch.is_grad_enabled()
