"""Which torch device a Spark task uses: from Spark's resource addresses to torch's numbering."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import torch

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.slots import VISIBLE

logger = logging.getLogger(__name__)


def choose_device(device: str, gpu: str | None, number: int) -> str:
    """The torch device to use: the GPU that Spark assigned, else one of the host's by number.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        gpu: the address of the GPU that Spark assigned; None if it assigned none.
        number: the number of the rank or partition.

    Returns:
        A device string such as ``cpu`` or ``cuda:0``; with ``auto``, a warning says if Spark
        assigned a GPU that torch cannot use.

    Raises:
        ConfigError: a GPU is asked for, but torch sees none, or not the one that Spark assigned.
    """
    if device == "cpu":
        return device
    # nvidia-smi, and so Spark, numbers GPUs this way; CUDA's own order is by speed.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not torch.cuda.is_available():
        if device == "auto":
            if gpu is not None:
                logger.warning(
                    "Spark assigned GPU %s on %s, but torch sees no GPU there: this task uses the "
                    "CPU. Install a CUDA build of torch on the executors, or set device='cpu' if "
                    "this is intended",
                    gpu,
                    socket.gethostname(),
                )
            return "cpu"
        raise ConfigError(
            f"device='{device}', but torch sees no GPU on this executor. Use device='auto', or run "
            "executors that have a GPU and a CUDA build of torch"
        )
    count = torch.cuda.device_count()
    if device.startswith("cuda:"):
        if int(device[5:]) >= count:
            raise ConfigError(
                f"device='{device}', but torch sees {count} GPUs on {socket.gethostname()}: cuda:0 "
                f"to cuda:{count - 1}. Use device='cuda'"
            )
        return device
    if gpu is None:
        return f"cuda:{number % count}"
    return f"cuda:{device_index(gpu, os.environ.get(VISIBLE), _uuids(count))}"


def device_index(address: str, visible: str | None, uuids: Sequence[str]) -> int:
    """Torch's number of the GPU at a Spark resource address.

    torch counts what CUDA_VISIBLE_DEVICES lists, in that order; without it, all GPUs as
    ``nvidia-smi`` numbers them. Spark's discovery script reports what ``nvidia-smi`` does, so an
    address is looked up in the list first; if it is not there, as on hosts where the list was set
    before Spark counted, the address is taken as a position in it.

    Args:
        address: a number (``3``) or a UUID (``GPU-8f3c...``, which may be shortened).
        visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        uuids: the UUIDs of the GPUs that torch sees, in its order.

    Raises:
        ConfigError: torch does not see that GPU.
    """
    listed = [entry.strip() for entry in visible.split(",")] if visible is not None else None
    index = _position(address, listed, uuids)
    if index is None or index >= len(uuids):
        seen = f"{VISIBLE}={visible}" if visible is not None else f"{VISIBLE} is not set"
        raise ConfigError(
            f"Spark assigned GPU {address} on {socket.gethostname()}, but torch sees "
            f"{len(uuids)} GPUs there and not that one ({seen}). The discovery script of "
            "spark.executor.resource.gpu must name the GPUs that the executor may use"
        )
    return index


def _position(address: str, listed: list[str] | None, uuids: Sequence[str]) -> int | None:
    if not address.isdecimal():
        known = uuids if listed is None or all(e.isdecimal() for e in listed) else listed
        found = [i for i, each in enumerate(known) if _same_uuid(address, each)]
        return found[0] if len(found) == 1 else None
    if listed is None:
        return int(address)
    if address in listed:
        return listed.index(address)
    return int(address) if int(address) < len(listed) else None


def _same_uuid(first: str, second: str) -> bool:
    """Whether two UUIDs are the same; either may be shortened, as CUDA allows."""
    return bool(first) and bool(second) and (first.startswith(second) or second.startswith(first))


def _uuids(count: int) -> list[str]:
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
