"""How a model is called and its loss's targets are shaped, in training and in prediction alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparkdl.protocols import Features, Targets


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


def align_targets(outputs: Any, targets: Targets) -> Targets:
    """Shape floating-point targets (examples,) like outputs (examples, 1).

    torch's regression losses would broadcast the two to (examples, examples) and train on
    nonsense with no more than a warning.
    """
    if (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[-1] == 1
    ):
        return targets.unsqueeze(-1)
    return targets
