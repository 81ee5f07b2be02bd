"""Parameter averaging as one writes it by hand in PySpark: a Spark job for every round.

In ``fit`` the driver broadcasts parameters and momentum, every partition trains ``period`` batches
and returns the result, and treeReduce adds them up. It is the best case of such a loop: tensors,
model and optimizer stay in the Python workers between the rounds of a fit, and the iterator is
drained, as otherwise Spark would start new Python processes for every round. Rows do not come
through Spark: each worker reads the file that was written for it.

``fit_frame`` is what most people write, one job per epoch on a DataFrame's rows. These become numpy
arrays once and are cached as such in an RDD; in every epoch each partition trains a copy of the
broadcast model on its arrays, with a new optimizer, and the driver takes the mean of what comes
back. Any DataFrame will do, as for ``TorchEstimator``.
"""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import digits
import numpy as np
import torch
from pyspark import Broadcast
from pyspark.sql import DataFrame, Row, SparkSession
from torch import nn

Arrays = tuple[np.ndarray, np.ndarray]
_replicas: dict[int, tuple[str, "_Replica"]] = {}
"""What this Python worker keeps between rounds, by partition, with the fit that it belongs to."""


class _Replica:
    """Model, optimizer and the tensors of one partition."""

    def __init__(self, folder: Path, partition: int, learning_rate: float) -> None:
        torch.set_num_threads(1)
        self.features, self.labels = digits.read_rows(digits.shard_path(folder, partition))
        self.model = digits.build_mlp()
        self.optimizer = digits.make_optimizer(self.model.parameters(), lr=learning_rate)
        self.momentum = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for parameter, momentum in zip(self.model.parameters(), self.momentum, strict=True):
            self.optimizer.state[parameter]["momentum_buffer"] = momentum

    def load(self, center: np.ndarray) -> None:
        parameters, momentum = torch.from_numpy(center.copy()).chunk(2)
        nn.utils.vector_to_parameters(parameters, self.model.parameters())
        sizes = [buffer.numel() for buffer in self.momentum]
        for buffer, part in zip(self.momentum, torch.split(momentum, sizes), strict=True):
            buffer.copy_(part.view_as(buffer))

    def flat(self) -> np.ndarray:
        parameters = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        return torch.cat([parameters, nn.utils.parameters_to_vector(self.momentum)]).numpy()

    def batches(self, seed: int, first: int, count: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.features), generator=generator)
        return list(torch.split(order, digits.BATCH_SIZE)[first : first + count])


def _window(
    partition: int,
    rows: Iterator[Any],
    *,
    folder: Path,
    fit_id: str,
    learning_rate: float,
    center: "Broadcast[np.ndarray]",
    seed: int,
    first: int,
    period: int,
) -> Iterator[tuple[np.ndarray, int]]:
    for _ in rows:
        pass
    kept_by, replica = _replicas.get(partition, (None, None))
    if replica is None or kept_by != fit_id:
        replica = _Replica(folder, partition, learning_rate)
        _replicas[partition] = fit_id, replica
    replica.load(center.value)
    examples = 0
    for batch in replica.batches(seed, first, period):
        features, labels = replica.features[batch], replica.labels[batch]
        digits.train_step(replica.model, replica.optimizer, features, labels)
        examples += len(batch)
    yield replica.flat() * examples, examples


def _add(left: tuple[np.ndarray, int], right: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    return left[0] + right[0], left[1] + right[1]


def fit(
    spark: SparkSession,
    folder: Path,
    *,
    epochs: int,
    period: int,
    learning_rate: float = digits.LEARNING_RATE,
    seed: int = 7,
    on_epoch: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Trains the MLP, averaging parameters and momentum every ``period`` batches.

    Args:
        spark: the session.
        folder: data set written by ``digits.write``.
        epochs: passes over the data.
        period: local batches between two rounds.
        learning_rate: the learning rate of SGD.
        seed: determines the initial parameters and the order of the rows.
        on_epoch: called with the averaged model after each epoch.

    Returns:
        The trained model.
    """
    torch.manual_seed(seed)
    model = digits.build_mlp()
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    center = torch.cat([parameters, torch.zeros_like(parameters)]).numpy()
    context = spark.sparkContext
    slots = context.parallelize(range(digits.WORKERS), digits.WORKERS)
    fit_id = uuid.uuid4().hex
    for epoch in range(epochs):
        for first in range(0, digits.STEPS, period):
            broadcast = context.broadcast(center)
            window = partial(
                _window,
                folder=folder,
                fit_id=fit_id,
                learning_rate=learning_rate,
                center=broadcast,
                seed=seed * 1_000 + epoch,
                first=first,
                period=period,
            )
            total, examples = slots.mapPartitionsWithIndex(window).treeReduce(_add)
            center = total / np.float32(examples)
            broadcast.unpersist()
        parameters, _ = torch.from_numpy(center).chunk(2)
        nn.utils.vector_to_parameters(parameters, model.parameters())
        if on_epoch is not None:
            on_epoch(model)
    return model


def _arrays(rows: Iterator[Row]) -> Iterator[Arrays]:
    kept = list(rows)
    features = np.array([row["features"] for row in kept], dtype=np.float32)
    yield features, np.array([row["label"] for row in kept], dtype=np.int64)


def _epoch(
    partition: int,
    arrays: Iterator[Arrays],
    *,
    center: "Broadcast[np.ndarray]",
    learning_rate: float,
    seed: int,
) -> Iterator[tuple[np.ndarray, int]]:
    torch.set_num_threads(1)
    ((features, labels),) = (tuple(map(torch.from_numpy, each)) for each in arrays)
    model = digits.build_mlp()
    nn.utils.vector_to_parameters(torch.from_numpy(center.value.copy()), model.parameters())
    optimizer = digits.make_optimizer(model.parameters(), lr=learning_rate)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    for batch in torch.split(order, digits.BATCH_SIZE):
        digits.train_step(model, optimizer, features[batch], labels[batch])
    trained = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    yield trained, len(features)


def fit_frame(
    frame: DataFrame,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
    on_epoch: Callable[[nn.Module], None],
) -> nn.Module:
    """Trains the MLP, averaging parameters once per epoch.

    Args:
        frame: one partition per worker, with the columns ``features`` and ``label``.
        epochs: passes over the data.
        learning_rate: the learning rate of SGD.
        seed: determines the initial parameters and the order of the rows.
        on_epoch: called with the averaged model after each epoch.

    Returns:
        The trained model.
    """
    torch.manual_seed(seed)
    model = digits.build_mlp()
    center = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    arrays = frame.rdd.mapPartitions(_arrays).cache()
    for epoch in range(epochs):
        broadcast = frame.sparkSession.sparkContext.broadcast(center)
        train: Any = partial(
            _epoch, center=broadcast, learning_rate=learning_rate, seed=seed * 1_000 + epoch
        )
        trained, examples = zip(*arrays.mapPartitionsWithIndex(train).collect(), strict=True)
        center = np.average(trained, axis=0, weights=examples).astype(np.float32)
        broadcast.unpersist()
        nn.utils.vector_to_parameters(torch.from_numpy(center), model.parameters())
        on_epoch(model)
    arrays.unpersist()
    return model
