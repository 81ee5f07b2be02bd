"""From gathered rows to the device that trains, alongside its own work where it is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.feed.columns.ragged import Column, Ragged


@dataclass(frozen=True)
class DeviceChunk:
    """Tensors on their way to a device.

    Attributes:
        columns: with their values on the device.
        arrived: set on the device's own queue when the copies are complete; None if they are.
    """

    columns: list[Column]
    arrived: torch.cuda.Event | None = None

    def ready(self) -> list[Column]:
        """The columns, in the order of the current stream's work after their arrival."""
        if self.arrived is not None:
            tensors = [c.values if isinstance(c, Ragged) else c for c in self.columns]
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.arrived)
            for tensor in tensors:
                # They were allocated on the copying stream, which must not reuse them early.
                tensor.record_stream(stream)
        return self.columns


_copying: dict[torch.device, torch.cuda.Stream] = {}


def to_device(columns: Sequence[Column], device: torch.device) -> DeviceChunk:
    """Start to copy columns to a device.

    Args:
        columns: in pinned memory if the device is a GPU.
        device: where to.
    """
    if device.type != "cuda":
        return DeviceChunk([column.to(device) for column in columns])
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _copying[device]
    with torch.cuda.stream(stream):
        moved = [
            column.to(device)
            if isinstance(column, Ragged)
            else column.to(device, non_blocking=True)
            for column in columns
        ]
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(stream)
    return DeviceChunk(moved, arrived)
