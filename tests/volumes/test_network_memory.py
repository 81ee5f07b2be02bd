"""What a network holds at once is counted, and a chunk has what it and Python leave of a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from test_transform_volume import SIZES, image, model_of
from test_volume_stores import stored
from torch import Tensor, nn
from volume_models import Edges

from sparkdl.errors import ConfigError
from sparkdl.volumes import run
from sparkdl.volumes.network import LiveBytes

VOXELS = (6, 8, 8)
BYTES = 4 * math.prod(VOXELS)
"""Of a channel."""
FIRST, SECOND = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 3, 1)


@every(
    ("function", "channels"),
    [
        (nn.Sequential(FIRST, nn.ReLU()), 8 + 8),
        (nn.Sequential(FIRST, nn.ReLU(inplace=True), SECOND), 8 + 3),
        (lambda patch: torch.cat([FIRST(patch), FIRST(patch)], 1), 8 + 8 + 16),
        (lambda patch: FIRST(patch).flatten().view(-1, 2), 8),
        (lambda patch: patch[:, :, 1:], 1),
        (lambda patch: (patch + 1).to_sparse().to_dense(), 1),  # but for the sparse one
    ],
)
def test_what_operations_return_is_counted_as_long_as_it_is_there(
    function: Callable[[Tensor], Any], channels: int
) -> None:
    given = torch.zeros(1, 1, *VOXELS)
    with torch.no_grad(), LiveBytes() as live:
        function(given)
    assert live.most == channels * BYTES


class Wide(nn.Module):
    """Holds 2,000 channels at once, and returns one."""

    def forward(self, patch: Tensor) -> Tensor:
        wide = patch.expand(-1, 1000, -1, -1, -1) + 1
        outputs: Tensor = (wide * 2).mean(1, keepdim=True)
        return outputs


@pytest.mark.usefixtures("spark")
def test_a_network_that_leaves_no_room_for_a_chunk_is_refused_before_any_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nobody limits the memory."""
    source = stored(tmp_path / "in.zarr", image())
    limit: list[int | None] = [run.PROCESS_BYTES + (64 << 20)]
    monkeypatch.setattr(run, "worker_bytes", lambda spark: limit[0])
    model_of(Edges()).transform_volume(source, tmp_path / "small", **SIZES)
    wide = model_of(Wide())
    with pytest.raises(ConfigError, match=r"MiB, and.* 0 are left for it.* smaller patch"):
        wide.transform_volume(source, tmp_path / "out", **SIZES)
    limit[0] = None
    done = wide.transform_volume(source, tmp_path / "out", **SIZES)
    assert done.computed == done.chunks
