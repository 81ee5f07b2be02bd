"""Here so that pytest finds the helpers beside this file from the folders below it, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparkdl.transport import channel
from sparkdl.transport.channel import Channel, Frames
from sparkdl.transport.framing import VALUES_KIND, read_prefix


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of values in and out of this process; the ranks are processes of their own."""
    counted: Counter[str] = Counter()
    send = Channel.send

    def counting_read(octets: bytearray) -> tuple[int, int]:
        kind, length = read_prefix(octets)
        counted["in"] += length if kind == VALUES_KIND else 0
        return kind, length

    def counting_send(
        self: Channel, frames: Frames, then: Callable[[], None] | None = None
    ) -> None:
        send(self, frames, then)
        if len(frames) > 1:  # prefixes and values in turn; a header is one frame
            counted["out"] += sum(map(len, frames[1::2]))

    monkeypatch.setattr(channel, "read_prefix", counting_read)
    monkeypatch.setattr(Channel, "send", counting_send)
    return counted


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype, int]]:
    """What this process gives torch to exchange: by which function, of which type, how many bytes.

    DistributedDataParallel's own sums are not among it: Python does not see them.
    """
    noted: list[tuple[str, torch.dtype, int]] = []

    def noting(name: str, place: int) -> Callable[..., Any]:
        exchange = getattr(dist, name)

        def note(*arguments: Any, **options: Any) -> Any:
            noted.append((name, arguments[place].dtype, arguments[place].nbytes))
            return exchange(*arguments, **options)

        return note

    for name, place in (("all_reduce", 0), ("all_to_all_single", 1), ("all_gather", 1)):
        monkeypatch.setattr(dist, name, noting(name, place))
    return noted
