"""A model that computes its own loss, on several workers, equals torch's loss in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from every_row import every
from torch import Tensor, nn
from toys import classification, make_job, relative_error, schema, sgd_on_union

from sparkdl.replica.losses import ModelLoss
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world


class Own(nn.Module):
    """Its logits, or with labels also the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, features: Tensor, *, kind: Tensor | None = None) -> Any:
        logits = self.layers(features)
        if kind is None:
            return logits
        return {"logits": logits, "loss": functional.cross_entropy(logits, kind)}


@every("strategy", [ParameterAveraging(period=1), GradientAllReduce()])
@every("as_kwargs", [False, True])
def test_the_loss_of_the_model_itself_equals_sgd_on_the_union_batch(
    strategy: Strategy[Any], as_kwargs: bool
) -> None:
    data = classification([12, 9])
    job = make_job(
        Own(),
        loss=ModelLoss(("kind",)),
        schema=replace(schema(), by_name=as_kwargs),
        features_as_kwargs=as_kwargs,
        strategy=strategy,
        epochs=3,
        deadline_s=120.0,
    )

    outcome = run_world(job, data.shards(), ranks_as="processes")

    oracle = sgd_on_union(Own(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) <= 1e-10
