"""Models with lazy layers, which learn the shapes of their parameters from a batch of zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparkdl.feed.columns.ragged import equal_rows
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ModelBuilder
from sparkdl.replica import forward


def has_lazy_parameters(module: nn.Module) -> bool:
    """Whether a module needs its first batch to learn its parameters' shapes."""
    return any(map(is_lazy, [*module.parameters(), *module.buffers()]))


@dataclass(frozen=True)
class Initialized:
    """Builds a model with lazy layers, and shows it a batch of zeros.

    Attributes:
        model: the builder.
        schema: the batch's tensors, all of known shapes except for padded ones.
        features_as_kwargs: as for ``Replica``.
        items: number of items in each padded row.
    """

    model: ModelBuilder
    schema: FeedSchema
    features_as_kwargs: bool = False
    items: int = 1

    def __call__(self) -> nn.Module:
        """Build the model; the caller seeds the random numbers."""
        module = self.model()
        rows = [equal_rows(each, torch.zeros(2), self.items) for each in self.schema.stored]
        training = module.training
        with torch.no_grad():
            features = self.schema.batch(rows, last=True).features
            forward(module.eval(), features, as_kwargs=self.features_as_kwargs)
        return module.train(training)
