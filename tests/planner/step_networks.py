"""Small networks of three kinds, and what torch's own profiler says that their steps take."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparkdl import Batch


class Residual(nn.Module):
    """Two convolutions with batch normalization and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Convolutions(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(blocks))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """A model of language whose loss takes more than its layers."""

    def __init__(
        self, words: int = 300, width: int = 32, hidden: int = 64, layers: int = 3, **given: Any
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True, **given)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x))).transpose(1, 2)


def mlp(layers: int = 4, width: int = 256) -> nn.Module:
    hidden = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def convolutions() -> nn.Module:
    return Convolutions(4)


CLASSES = nn.CrossEntropyLoss()
KINDS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    kind: (build, Batch((features,), targets, last=False))
    for kind, build, features, targets in (
        ("mlp", mlp, torch.randn(3, 256), torch.tensor([1, 2, 0])),
        ("convolutions", convolutions, torch.randn(3, 3, 16, 16), torch.tensor([1, 2, 0])),
        ("transformer", Transformer, torch.randint(300, (3, 12)), torch.randint(300, (3, 12))),
    )
}


def most_allocated(work: Callable[[], Any]) -> int:
    """By torch's allocator: the most bytes at any time of what the work allocates."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [each["args"] for each in events if each.get("name") == "[memory]"]
    before = found[0]["Total Allocated"] - found[0]["Bytes"]
    return max(each["Total Allocated"] for each in found) - before
