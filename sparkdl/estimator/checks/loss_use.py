"""How a fit's loss is used, tried out on made-up rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.loss_use import use_for
from sparkdl.replica.losses import LossUse, ModelLoss
from sparkdl.replica.targets import distinct_rows


def loss_use(replica: Replica, batch_of: Callable[[int], Batch], *, scores: bool) -> LossUse:
    """Find the shapes in which a loss takes its targets.

    Args:
        replica: one that is thrown away afterwards.
        batch_of: a made-up minibatch of so many rows.
        scores: whether rows will be scored with the loss.

    Raises:
        ModelError: a row's loss, where one is wanted, depends on other rows.
    """
    if isinstance(replica.loss, ModelLoss):
        return LossUse()
    batches: dict[int, Batch] = {}

    def outputs_of(rows: int) -> Any:
        batches[rows] = batch_of(rows)
        return replica.outputs(batches[rows])

    replica.module.train()
    with torch.no_grad():
        try:
            rows, outputs = distinct_rows(outputs_of)
        except Exception:  # the user's forward may raise anything; it is called again, and reported
            return LossUse()
        batch = batches[rows]
        return use_for(
            replica.loss, outputs, batch.targets, rows, weights=batch.weights, by_row=scores
        )
