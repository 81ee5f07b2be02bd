"""What ``transform`` has to know of a module that was trained elsewhere, told from an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ConfigError, ModelError
from sparkdl.outputs import Widths, described, widths_of
from sparkdl.protocols import ColumnSpec, Features
from sparkdl.randomness import borrowed_random_numbers
from sparkdl.replica import forward

_ROWS = 5
"""As many as few models have layers or classes, so that an output that is not one value a row
shows by its length."""

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Features of at least one row, each of shape (rows, ...): one tensor, one an argument, or one a
name."""


def named_features(example: Example, names: Sequence[str]) -> dict[str, Tensor]:
    """The example's tensors by the columns that such rows will come from.

    Args:
        example: as the user gave it.
        names: of the columns in the order of the model's arguments.

    Raises:
        ConfigError: the example is not one tensor a column, or has no rows.
    """
    if isinstance(example, Mapping):
        found = dict(example)
        if list(found) != list(names):
            raise ConfigError(
                f"the example has {', '.join(map(repr, found))}, but the feature columns are "
                f"{', '.join(map(repr, names))}. Name the same ones in the same order"
            )
    else:
        tensors = [example] if isinstance(example, Tensor) else list(example)
        if len(tensors) != len(names):
            raise ConfigError(
                f"the example has {len(tensors)} tensors, but {len(names)} feature columns are "
                f"named: {', '.join(names)}. Name one for each: featuresCols=[...]"
            )
        found = dict(zip(names, tensors, strict=True))
    rows = {
        len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
        for tensor in found.values()
    }
    if len(rows) != 1 or rows == {0}:
        shown = ", ".join(f"'{name}' {described(tensor)}" for name, tensor in found.items())
        raise ConfigError(
            "an example is what the module takes for some rows, each tensor of shape (rows, ...); "
            f"this one is {shown or 'empty'}"
        )
    return found


def specs_of(features: Mapping[str, Tensor], images: Sequence[str]) -> list[ColumnSpec]:
    """The tensors that the columns become.

    Args:
        features: of the example, by column.
        images: the columns of encoded images.

    Raises:
        ConfigError: an image column is none of the features.
    """
    unknown = sorted(set(images) - set(features))
    if unknown:
        raise ConfigError(
            f"imageCols names '{unknown[0]}', which is no feature: {', '.join(features)}"
        )
    return [
        ColumnSpec(
            name, tensor.dtype, tuple(tensor.shape[1:]), "image" if name in images else "numbers"
        )
        for name, tensor in features.items()
    ]


def output_widths(
    module: nn.Module, features: Mapping[str, Tensor], *, by_name: bool, as_kwargs: bool
) -> Widths:
    """Run a module on an example to learn what it returns; it is left as it was.

    Args:
        module: any, on the CPU.
        features: the example, by column.
        by_name: whether it takes its features by name.
        as_kwargs: whether as keyword arguments instead of one dict.

    Raises:
        ModelError: the module fails on the example, or returns nothing that could be a column.
        ConfigError: the module is not on the CPU.
    """
    elsewhere = {str(each.device) for each in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise ConfigError(
            f"the module is on {', '.join(sorted(elsewhere))}, from where it cannot be sent to "
            "executors, which may have no such device: give module.cpu(). predictDevice says where "
            "it predicts"
        )
    picked = {name: tensor[torch.arange(_ROWS) % len(tensor)] for name, tensor in features.items()}
    given: Features = picked if by_name else tuple(picked.values())
    modes = {each: each.training for each in module.modules()}
    try:
        with borrowed_random_numbers(), torch.no_grad():
            returned: Any = forward(module.eval(), given, as_kwargs=as_kwargs)
    except Exception as error:  # a user's forward may raise anything
        shown = ", ".join(f"'{name}' {described(each)}" for name, each in picked.items())
        raise ModelError(
            f"the module fails on the example ({shown}): {type(error).__name__}: {error}"
        ) from error
    finally:
        for each, training in modes.items():
            each.training = training
    widths = widths_of(returned, _ROWS)
    if not widths:
        raise ModelError(
            f"the module returns {described(returned)} for {_ROWS} rows: nothing with one value, "
            "or several, a row. Wrap it in a module that returns such tensors"
        )
    return widths
