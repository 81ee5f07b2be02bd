"""Which torch device a Spark task uses."""

from __future__ import annotations

import torch
from pyspark import TaskContext

from sparkdl.errors import ConfigError


def choose_device(device: str, context: TaskContext) -> str:
    """The torch device of this task: the GPU that Spark assigned, else the host's by partition.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        context: the running task's.

    Returns:
        A device string such as ``cpu`` or ``cuda:0``.

    Raises:
        ConfigError: a GPU is asked for and torch sees none.
    """
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        if device == "auto":
            return "cpu"
        raise ConfigError(
            f"device='{device}', but torch sees no GPU on this executor. Use device='auto', or run "
            "executors that have a GPU and a CUDA build of torch"
        )
    if device.startswith("cuda:"):
        return device
    assigned = context.resources().get("gpu")
    if assigned is not None:
        return f"cuda:{assigned.addresses[0]}"
    return f"cuda:{context.partitionId() % torch.cuda.device_count()}"
