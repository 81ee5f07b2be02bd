"""How the user's function that builds an optimizer is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn

from sparkdl.protocols import OptimizerBuilder

NamedParameters = Iterable[tuple[str, nn.Parameter]]
"""(name in the module, parameter), as ``nn.Module.named_parameters`` yields them."""

NAMED = "named_parameters"
"""The name of a builder's first argument if it wants the parameters' names."""


def takes_names(build: OptimizerBuilder) -> bool:
    """Whether a builder takes parameters with their names: its first argument says so."""
    try:
        arguments = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a built-in has no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next(iter(arguments), None)
    return first is not None and first.kind in positional and first.name == NAMED


def build_optimizer(build: OptimizerBuilder, named: NamedParameters) -> torch.optim.Optimizer:
    """Build the optimizer for a module's parameters.

    Args:
        build: the user's function, or optimizer class.
        named: the parameters to train, in the module's order.
    """
    pairs = list(named)
    return build(pairs if takes_names(build) else [parameter for _, parameter in pairs])
