"""From gathered rows to the device that trains, beside its own work where it is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceChunk:
    """Tensors on their way to a device.

    Attributes:
        tensors: on the device.
        arrived: set on the device's own queue when the copies are complete; None if they are.
    """

    tensors: list[Tensor]
    arrived: torch.cuda.Event | None = None

    def ready(self) -> list[Tensor]:
        """The tensors, in the order of the current stream's work after their arrival."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.arrived)
            for tensor in self.tensors:
                # They were allocated on the copying stream, which must not reuse them early.
                tensor.record_stream(stream)
        return self.tensors


_copying: dict[torch.device, torch.cuda.Stream] = {}


def to_device(tensors: Sequence[Tensor], device: torch.device) -> DeviceChunk:
    """Start to copy tensors to a device.

    Args:
        tensors: in pinned memory if the device is a GPU.
        device: where to.
    """
    if device.type != "cuda":
        return DeviceChunk([tensor.to(device) for tensor in tensors])
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _copying[device]
    with torch.cuda.stream(stream):
        moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(stream)
    return DeviceChunk(moved, arrived)
