"""Models whose forward leaves traces in files, for fits on real executors.

Executors cannot import this module, so it is pickled by value. A trace is one line a call, appended
to a file in one write; every executor of the test cluster runs on this machine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.nn.functional as functional
from pyspark import TaskContext
from torch import Tensor, nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def append_line(path: str, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def task_rank() -> int:
    """The partition of the running Spark task; -1 in the driver."""
    context = TaskContext.get()
    return -1 if context is None else context.partitionId()


def decayed(
    named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float = 0.1
) -> torch.optim.Optimizer:
    """SGD with weight decay on weights, and none on biases."""
    named = list(named_parameters)
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.5},
        {"params": [p for name, p in named if not name.endswith("weight")]},
    ]
    return torch.optim.SGD(groups, lr=lr)


class Net(nn.Module):
    """4 numbers to 3 classes; importable, so it can be saved without pickle."""

    def __init__(self, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Drawn(Net):
    """Takes its inputs in an order that it draws, and signs of numpy's, neither in its state.

    torch cannot pickle it.
    """

    def __init__(self, width: int = 4, outputs: int = 3) -> None:
        super().__init__(width, outputs)
        self.order = torch.randperm(width)
        self.signs = np.random.choice([-1.0, 1.0], width).astype(np.float32)
        nn.utils.parametrizations.weight_norm(self.layers[0])

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features[:, self.order] * torch.from_numpy(self.signs))


def announced(path: str, seconds: float) -> Net:
    """What builds a ``Net`` slowly; workers first append their rank to a file."""
    if task_rank() >= 0:
        append_line(path, str(task_rank()))
        time.sleep(seconds)
    return Net()


class Traced(Net):
    """Records the process and rank of each forward pass."""

    def __init__(self, path: str, width: int = 4, outputs: int = 3) -> None:
        super().__init__(width, outputs)
        self.path = path

    def forward(self, features: Tensor) -> Tensor:
        append_line(self.path, f"{os.getpid()} {task_rank()}")
        return self.layers(features)


class RowIds(nn.Module):
    """Takes the row ids as a second argument; records those of each minibatch as ``rank id id``."""

    def __init__(self, path: str, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.path = path
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        if task_rank() >= 0:
            append_line(self.path, " ".join(map(str, [task_rank(), *ids.tolist()])))
        return self.layers(features)


def minibatches(path: str | Path) -> dict[int, list[list[int]]]:
    """The row ids that ``RowIds`` has recorded of each rank, by minibatch."""
    found: dict[int, list[list[int]]] = {}
    for line in lines(path):
        rank, *ids = map(int, line.split())
        found.setdefault(rank, []).append(ids)
    return found


def row_ids(path: str | Path) -> dict[int, list[int]]:
    """The same, one behind the other."""
    return {
        rank: [i for ids in batches for i in ids] for rank, batches in minibatches(path).items()
    }


class Saboteur(nn.Module):
    """Does ``deed`` on one rank in its ``step``-th forward pass; records each pass as ``rank``."""

    def __init__(self, path: str, deed: str, rank: int = 1, step: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.path, self.deed, self.rank, self.step = path, deed, rank, step
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        if task_rank() < 0:
            return self.layer(features)
        self.passes += 1
        append_line(self.path, f"{task_rank()} {self.passes}")
        if task_rank() == self.rank and self.passes == self.step:
            getattr(self, self.deed)()
        return self.layer(features)

    def explode(self) -> None:
        raise ZeroDivisionError("the reactor is empty")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self) -> None:
        time.sleep(60)


class DiesOnce(nn.Module):
    """Takes its process, or its whole executor, along in a pass of one rank; only once in all."""

    def __init__(self, path: str, *, executor: bool, rank: int = 1, step: int = 7) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.path, self.executor, self.rank, self.step = path, executor, rank, step
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += task_rank() >= 0
        if task_rank() == self.rank and self.passes == self.step and not lines(self.path):
            append_line(self.path, str(os.getpid()))
            if self.executor:
                # A Python worker is a child of the daemon, which is a child of the executor.
                daemon = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
                os.kill(daemon, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(features)


class Slow(nn.Module):
    """Takes some seconds for each minibatch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.seconds = seconds

    def forward(self, features: Tensor) -> Tensor:
        if task_rank() >= 0:
            time.sleep(self.seconds)
        return self.layer(features)


class TwoTables(nn.Module):
    """An integer column to an embedding, an array beside it."""

    def __init__(self, entries: int = 5, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, 2)
        self.layer = nn.Linear(width + 2, outputs)

    def forward(self, index: Tensor, features: Tensor) -> Tensor:
        if index.dtype is not torch.int64:
            raise TypeError(f"an embedding takes int64, not {index.dtype}")
        return self.layer(torch.cat([self.table(index), features], dim=1))


class Single(nn.Module):
    """One output a row, without a dimension of its own if ``squeeze``."""

    def __init__(self, *, squeeze: bool = False, sigmoid: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.squeeze, self.sigmoid = squeeze, sigmoid

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.layer(features)
        outputs = outputs.sigmoid() if self.sigmoid else outputs
        return outputs[:, 0] if self.squeeze else outputs


class Scalar(nn.Module):
    """A scalar column, of shape (rows,), to one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: a dict whose entries are attributes too, and of which none is None."""

    def __init__(self, **entries: Any) -> None:
        super().__init__({name: each for name, each in entries.items() if each is not None})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OwnLoss(nn.Module):
    """As Hugging Face's classifiers: several outputs by name, the loss too if there are labels.

    Records each forward pass as its process, and whether there were labels.
    """

    def __init__(self, path: str = "", *, as_tuple: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.path, self.as_tuple = path, as_tuple

    def forward(
        self, features: Tensor, scale: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        if self.path:
            append_line(self.path, f"{os.getpid()} {labels is not None}")
        pooled = self.body(features).tanh()
        logits = self.head(pooled if scale is None else pooled * scale[:, None])
        loss = None if labels is None else functional.cross_entropy(logits, labels.long())
        outputs = ModelOutput(loss=loss, logits=logits, pooled=pooled, layers=(pooled, logits))
        return tuple(outputs.values()) if self.as_tuple else outputs
