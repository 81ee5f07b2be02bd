"""How a model is called, in training and in prediction alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparkdl.protocols import Features


def forward(
    module: nn.Module,
    features: Features,
    *,
    as_kwargs: bool = False,
    labels: Mapping[str, Tensor] | None = None,
) -> Any:
    """Call a module with its features as separate arguments, or as one dict.

    Args:
        module: the model.
        features: its inputs.
        as_kwargs: whether features with names are passed as keyword arguments.
        labels: further keyword arguments.
    """
    named = labels or {}
    if not isinstance(features, dict):
        return module(*features, **named)
    return module(**features, **named) if as_kwargs else module(features, **named)
