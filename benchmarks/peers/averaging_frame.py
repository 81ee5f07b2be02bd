"""Parameter averaging as most people write it in PySpark: one job per epoch on a DataFrame's rows.

Rows become numpy arrays once and are cached as such in an RDD; in every epoch each partition trains
a copy of the broadcast model on its arrays, with a new optimizer, and the driver takes the mean of
what comes back. Any DataFrame will do, as for ``TorchEstimator``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import digits
import numpy as np
import torch
from pyspark import Broadcast
from pyspark.sql import DataFrame, Row
from torch import nn

Arrays = tuple[np.ndarray, np.ndarray]


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


def fit(
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
