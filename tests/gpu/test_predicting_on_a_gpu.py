"""Executors predict on the GPU that Spark has assigned, however it and CUDA name it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from subprocesses import run_python
from torch import nn
from toys import mlp

from sparkdl.checkpoint.portable import pickled_module
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference import predictor as predictor_module
from sparkdl.spark.inference.predictor import OutputColumn, PredictionSettings, Predictor
from sparkdl.spark.inference.shared_model import SharedModel

ROWS, WIDTH = 3_000, 6
CHOOSE = "from sparkdl.spark.cluster.devices import choose_device; import sys; "
CHOOSE += "print(choose_device('cuda', sys.argv[1], 0))"


def uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def chosen(address: str, visible: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return run_python(
        "-c", CHOOSE, address, env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


@every("visible", [None, "0", "uuid", "shortened"])
@every("address", ["0", "uuid", "shortened"])
def test_an_address_is_found_under_each_name_that_cuda_takes(
    address: str, visible: str | None
) -> None:
    names = {"0": "0", "uuid": uuid(), "shortened": uuid()[:14], None: None}
    found = chosen(str(names[address]), names[visible])
    assert found.stdout.strip() == "cuda:0", found.stderr


def test_what_nvidia_smi_lists_is_what_torch_calls_it() -> None:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"0, {uuid()}" in listed.stdout.splitlines()


@every_row(("7", None), ("GPU-00000000", None), ("MIG-77", None), ("MIG-77", "MIG-77"), ("0", ""))
def test_a_gpu_that_is_not_there_is_an_error_in_words(address: str, visible: str | None) -> None:
    failed = chosen(address, visible)
    assert failed.returncode
    assert "ConfigError" in failed.stderr.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:::torch")
@every_row(
    (None, 1e-6, False),
    (torch.float16, 5e-3, False),
    (torch.bfloat16, 3e-2, False),
    (torch.float16, 5e-3, True),
)
def test_predictions_are_those_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, tolerance: float, *, compiled: bool
) -> None:
    module = mlp().float().eval()
    gpus = {"gpu": SimpleNamespace(addresses=["0"])}
    task = SimpleNamespace(
        partitionId=lambda: 0, taskAttemptId=lambda: 0, cpus=lambda: 1, resources=lambda: gpus
    )
    monkeypatch.setattr(predictor_module.TaskContext, "get", lambda: task)
    pickled: Any = SimpleNamespace(value=pickled_module(module, None))
    predictor = Predictor(
        SharedModel(f"test {dtype} {compiled}", pickled, None),
        [OutputColumn("prediction", None, lambda outputs: outputs, wide=True)],
        None,
        False,
        PredictionSettings(
            batch_rows=256, device="auto", dtype=dtype, compiled=compiled, double=False
        ),
        TorchSettings.here(),
    )
    rows = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), WIDTH)
    spec = ColumnSpec("features", torch.float32, (WIDTH,))
    with predictor.running() as run:
        assert run.device == "cuda:0"
        assert next(run.module.parameters()).is_cuda
    ((predicted,),) = predictor.predictions(iter([([column], [spec])]))
    with torch.no_grad():
        expected = nn.Sequential(module)(torch.from_numpy(rows)).numpy()
    found = np.stack(predicted.to_numpy(zero_copy_only=False))
    assert np.allclose(found, expected, atol=tolerance, rtol=tolerance)
