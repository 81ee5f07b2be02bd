"""What ``transform`` must know about a module trained elsewhere, derived from an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.arguments import counted
from sparkdl.encodings import IMAGE
from sparkdl.encodings.any_size import FITS
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.outputs import require_any_length
from sparkdl.feed.columns.schema import Ragged, inputs_described, model_inputs
from sparkdl.outputs import Widths, described, form_of, pick, widths_of
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.replica import forward
from sparkdl.replica.buffers import left_as_it_was
from sparkdl.replica.initial import has_lazy_parameters
from sparkdl.spark.rows.column_overrides import ColumnOverrides, ImageColumns
from sparkdl.user_code.tracebacks import message_of

_ROWS = 5
"""A number that few models have of layers or classes, so that an output's length tells whether it
has one value per row."""

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Features of at least one row, in tensors of shape (rows, ...): one, one per argument, or one per
name."""


def named_features(example: Example, names: Sequence[str]) -> dict[str, Tensor]:
    """The example's tensors by the columns that such rows will come from.

    Args:
        example: as the user gave it.
        names: of the columns, in the order of the model's arguments.

    Raises:
        ConfigError: the example does not have one tensor per column, or has no rows.
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
                f"the example has {counted(len(tensors), 'tensor')} for "
                f"{counted(len(names), 'feature column')}: {', '.join(names)}. Name one per "
                "tensor: featuresCols=[...]"
            )
        found = dict(zip(names, tensors, strict=True))
    rows = {
        len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
        for tensor in found.values()
    }
    if len(rows) != 1 or rows == {0}:
        shown = ", ".join(f"'{name}' {described(tensor)}" for name, tensor in found.items())
        raise ConfigError(
            "an example is the module's input for a few rows, each tensor of shape (rows, ...); "
            f"this one is {shown or 'empty'}"
        )
    return found


def specs_of(features: Mapping[str, Tensor], overrides: ColumnOverrides) -> list[ColumnSpec]:
    """The tensors that the columns become.

    Args:
        features: of the example, by column.
        overrides: which columns hold images or are padded, and how.

    Raises:
        ConfigError: a column cannot be one of images, or cannot be padded.
    """
    images = overrides.images
    return [
        _spec_of(name, tensor, images if name in images.names else None, overrides.padding(name))
        for name, tensor in features.items()
    ]


def _spec_of(
    name: str, tensor: Tensor, images: ImageColumns | None, padding: Padding | None
) -> ColumnSpec:
    shape = tuple(tensor.shape[1:])
    if padding is None and images is None:
        return ColumnSpec(name, tensor.dtype, shape)
    if padding is None and images is not None:
        encoding = IMAGE if images.size is None else FITS[images.fit]
        fault = encoding.shape_fault(shape)
        if fault is not None:
            raise ConfigError(f"{fault}; the example has '{name}' of {described(tensor)}")
        images.shape(name, shape)
        scale = images.floats(name, tensor.dtype, shape[0])
        dtype = tensor.dtype if scale is None else torch.uint8
        return ColumnSpec(name, dtype, shape, encoding, scale=scale)
    if images is not None or padding is None or len(shape) not in (1, 2) or shape[0] < 2:
        raise ConfigError(
            f"padCols pads rows of numbers or of items, but the example has '{name}' of "
            f"{described(tensor)}: give it rows of two items or more, shape (rows, items) or "
            "(rows, items, width)"
        )
    return ColumnSpec(name, tensor.dtype, (UNKNOWN, *shape[1:]), padding=padding)


def output_widths(
    module: nn.Module,
    features: Mapping[str, Tensor],
    specs: Sequence[ColumnSpec],
    *,
    by_name: bool,
    as_kwargs: bool,
) -> Widths:
    """Run a module on an example to learn what it returns, and leave it as it was.

    Args:
        module: any, on the CPU.
        features: the example, by column.
        specs: what the columns become.
        by_name: whether it takes its features by name.
        as_kwargs: whether as keyword arguments instead of one dict.

    Raises:
        ModelError: the module fails on the example, or returns nothing that can be a column.
        ConfigError: the module is not on the CPU.
    """
    elsewhere = {str(each.device) for each in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise ConfigError(
            f"the module is on {', '.join(sorted(elsewhere))}, and cannot be sent from there to "
            "executors, which may have no such device: give module.cpu(). predictDevice says "
            "where it predicts"
        )
    rows = torch.arange(_ROWS)
    columns = {name: tensor[rows % len(tensor)] for name, tensor in features.items()}
    # Lazy layers stay as the example has initialized them.
    with left_as_it_was(module, values=not has_lazy_parameters(module)):
        _to_evaluation(module)
        widths = _widths(module, columns, specs, 0, by_name, as_kwargs)
        if any(spec.padding is not None for spec in specs):
            shorter = _widths(module, columns, specs, 1, by_name, as_kwargs)
            require_any_length(widths, shorter, list(widths))
    return widths


def _to_evaluation(module: nn.Module) -> None:
    try:
        module.eval()
    except NotImplementedError as error:
        raise ModelError(
            f"the module cannot be put into evaluation mode: {error} For a torch.export result, "
            "give the program itself, not its module()"
        ) from error


def _widths(
    module: nn.Module,
    columns: Mapping[str, Tensor],
    specs: Sequence[ColumnSpec],
    less: int,
    by_name: bool,
    as_kwargs: bool,
) -> Widths:
    """What a module returns for rows that are shorter by ``less`` where they are padded."""
    rows = [
        tensor if spec.padding is None else _ragged(tensor[:, : tensor.shape[1] - less])
        for tensor, spec in zip(columns.values(), specs, strict=True)
    ]
    as_taken = [replace(spec, scale=None) for spec in specs]  # the example has floats already
    given = model_inputs(rows, as_taken, by_name=by_name)
    try:
        # What the module keeps of this must not be of its caller's inference mode.
        with borrowed_random_numbers(), torch.inference_mode(False), torch.no_grad():
            returned: Any = forward(module, given, as_kwargs=as_kwargs)
    except Exception as error:  # the user's forward may raise anything
        shown = inputs_described(given, specs)
        raise ModelError(
            f"the module fails on the example ({shown}): {message_of(error)}"
        ) from error
    widths = widths_of(returned, _ROWS)
    if not widths:
        if isinstance(returned, Tensor) and form_of(returned):
            pick(returned, None, _ROWS)  # tells what to return instead
        raise ModelError(
            f"the module returns {described(returned)} for {_ROWS} rows: nothing with one or more "
            "values per row. Wrap it in a module that returns such tensors"
        )
    return widths


def _ragged(rows: Tensor) -> Ragged:
    """Rows of equal length, in the form of those of any length."""
    return Ragged(rows.flatten(0, 1), torch.full((len(rows),), rows.shape[1]))
