"""Small models, data and reference algorithms that several tests share; nothing here is sparkdl's.

``average_by_hand`` is the oracle of parameter averaging: plain torch replicas in one process, means
in float64 numpy.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from sparkdl.averager import Averager
from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.driver import as_builder
from sparkdl.feed.order import generator
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of
from sparkdl.worker import Job

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
"""What columns, parameters and buffers may be of."""
SEED = 11
SGD = partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Data:
    """Rows of one table: features (n, width), targets (n,), and how many rows each rank has."""

    features: np.ndarray
    targets: np.ndarray
    sizes: tuple[int, ...]

    def shard(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        start = sum(self.sizes[:rank])
        stop = start + self.sizes[rank]
        return self.features[start:stop], self.targets[start:stop]

    def shards(self, rows_a_batch: int = 7) -> list[list[pa.RecordBatch]]:
        return [
            batches_of(rows_a_batch, features=features, label=targets) if len(targets) else []
            for features, targets in map(self.shard, range(len(self.sizes)))
        ]


def enough_rows(sizes: Sequence[int]) -> bool:
    """Whether there is a row for each worker, without which no run starts."""
    return sum(sizes) >= len(sizes)


def classification(
    sizes: Sequence[int],
    *,
    width: int = 6,
    classes: int = 3,
    dtype: Any = np.float64,
    seed: int = 0,
) -> Data:
    """Gaussian features, the class told by a random linear map."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(sum(sizes), width)).astype(dtype)
    targets = (features @ generator.normal(size=(width, classes))).argmax(axis=1)
    return Data(features, targets.astype(np.int64), tuple(sizes))


def schema(width: int = 6, dtype: torch.dtype = torch.float64) -> FeedSchema:
    return FeedSchema((ColumnSpec("features", dtype, (width,)),), ColumnSpec("label", torch.int64))


class HeldOut(Data):
    """Of which every third row of each worker is held out by ``held_out_schema``."""

    def shards(self, rows_a_batch: int = 7) -> list[list[pa.RecordBatch]]:
        return [
            batches_of(rows_a_batch, features=f, label=t, held=np.arange(len(t)) % 3 == 0)
            if len(t)
            else []
            for f, t in map(self.shard, range(len(self.sizes)))
        ]


def held_out(sizes: Sequence[int]) -> HeldOut:
    return HeldOut(**vars(classification(sizes)))


def held_out_schema() -> FeedSchema:
    return replace(schema(), validation=ColumnSpec("held", torch.bool))


def mlp(width: int = 6, classes: int = 3, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes)).double()


def cnn(classes: int = 3, seed: int = 4) -> nn.Module:
    """For rows of 36 numbers, an image of 6 x 6."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, classes),
    ).double()


class SparseTable(nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5, 3, sparse=True).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.table((features[:, 0].abs() % 5).long())
        return outputs


class Rateless(torch.optim.Optimizer):
    """Keeps its learning rate to itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Take none."""


def make_job(model: Any, **changes: Any) -> Job:
    """A job on ``schema()``: SGD at 0.1, period 1, one epoch, batches of 4, a short deadline."""
    settings: dict[str, Any] = {
        "model": as_builder(model),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": SGD,
        "strategy": ParameterAveraging(period=1),
        "schema": schema(),
        "epochs": 1,
        "batch_size": 4,
        "seed": SEED,
        "deadline_s": 120.0,
    }
    return Job(**{**settings, **changes})


def parameters_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy().copy() for name, p in module.named_parameters()}


def relative_error(module: nn.Module, oracle: nn.Module) -> float:
    """Largest difference of the two state dicts, relative to the largest value of each tensor."""
    mine, other = module.state_dict(), oracle.state_dict()
    assert mine.keys() == other.keys()
    return max(
        float((mine[k] - other[k]).abs().max() / other[k].abs().max().clamp_min(1e-12))
        for k in other
        if other[k].is_floating_point()
    )


Part = tuple[np.ndarray, np.ndarray]
"""The features and the targets of a minibatch."""


def sgd_on_union(
    model: nn.Module,
    data: Data,
    optimizer: Any = SGD,
    *,
    epochs: int,
    batch_size: int = 4,
    accumulate: int = 1,
    clip_norm: float | None = None,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy,
    by_parts: bool = False,
) -> nn.Module:
    """One process; step t trains on the ranks' t-th ``accumulate`` minibatches put together.

    ``by_parts`` adds up the gradients of minibatches, as autocast rounds each of those by itself.
    """
    module = copy.deepcopy(model).train()
    steps = optimizer(module.parameters())
    for _, ranks in windows_by_hand(data, epochs, batch_size, accumulate):
        parts = [part for window in ranks.values() for part in window]
        total = sum(len(targets) for _, targets in parts)
        steps.zero_grad()
        for features, targets in parts if by_parts else [union(parts)]:
            value = loss(module(torch.from_numpy(features)), torch.from_numpy(targets))
            (value * (len(targets) / total)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        steps.step()
    return module


def windows_by_hand(
    data: Data, epochs: int, batch_size: int = 4, period: int | Callable[[int], int] = 1
) -> Iterator[tuple[int, dict[int, list[Part]]]]:
    """For each window of each epoch its minibatches, by the ranks that have some left."""
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, batch_size) for rank in range(len(data.sizes))]
        steps = period(epoch) if callable(period) else period
        for start in range(0, max(map(len, plans)), steps):
            windows = {rank: plan[start : start + steps] for rank, plan in enumerate(plans)}
            yield epoch, {rank: window for rank, window in windows.items() if window}


def union(parts: Sequence[Part]) -> Part:
    features, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
    return features, targets


def permutation(rows: int, *, seed: int, epoch: int, rank: int) -> torch.Tensor:
    """The order in which a worker sees its rows in an epoch, as documented."""
    return torch.randperm(rows, generator=generator(seed, epoch, rank))


def batches_by_hand(data: Data, rank: int, epoch: int, batch_size: int) -> list[Part]:
    """The minibatches of one rank, in the documented permutation."""
    features, targets = data.shard(rank)
    order = permutation(len(targets), seed=SEED, epoch=epoch, rank=rank).numpy()
    return [
        (features[order[i : i + batch_size]], targets[order[i : i + batch_size]])
        for i in range(0, len(order), batch_size)
    ]


def average_by_hand(
    model: nn.Module,
    optimizer: Any,
    data: Data,
    *,
    period: int,
    epochs: int,
    batch_size: int,
    average_optimizer_state: bool,
) -> nn.Module:
    """Local training in windows of ``period`` minibatches, then a mean weighted by examples."""
    modules = [copy.deepcopy(model).train() for _ in data.sizes]
    optimizers = [optimizer(module.parameters()) for module in modules]
    for _, windows in windows_by_hand(data, epochs, batch_size, period):
        for rank, window in windows.items():
            _train_by_hand(modules[rank], optimizers[rank], window)
        weights = rows_of(windows)
        _average([m.state_dict() for m in modules], weights)
        if average_optimizer_state:
            _average_optimizers(optimizers, weights)
    return modules[0]


def rows_of(windows: dict[int, list[Part]]) -> dict[int, int]:
    return {rank: sum(len(targets) for _, targets in parts) for rank, parts in windows.items()}


def _train_by_hand(module: nn.Module, optimizer: torch.optim.Optimizer, window: list[Part]) -> None:
    for features, targets in window:
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(features))
        nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
        optimizer.step()


def _average(states: list[dict[Any, torch.Tensor]], weights: dict[int, int]) -> None:
    """Write the mean of the ranks in ``weights`` into the tensors of every rank."""
    for key in states[min(weights)]:
        members = {rank: states[rank][key] for rank in weights}
        mean = sum(
            weights[rank] * tensor.double().numpy() for rank, tensor in members.items()
        ) / sum(weights.values())
        first = members[min(weights)].clone()
        for state in states:
            if key in state:
                value = torch.as_tensor(mean) if first.is_floating_point() else first
                state[key].copy_(value)


def _average_optimizers(optimizers: list[torch.optim.Optimizer], weights: dict[int, int]) -> None:
    parameter_lists = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for place in range(len(parameter_lists[0])):
        states = [
            {k: v for k, v in optimizer.state[ps[place]].items() if isinstance(v, torch.Tensor)}
            for optimizer, ps in zip(optimizers, parameter_lists, strict=True)
        ]
        with torch.no_grad():
            _average(states, weights)


def drive(averager: Averager) -> list[Event]:
    """Do the driver's part until the run is over: start the workers when all rows are known."""
    events = []
    for event in averager.events():
        if isinstance(event, DataStatistics):
            averager.start()
        events.append(event)
    return events


def sparkdl_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("sparkdl")]
