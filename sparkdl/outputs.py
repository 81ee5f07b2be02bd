"""What a model returns: one tensor, or several in a tuple, a dict or an object with fields.

Hugging Face's ``ModelOutput`` is a dict whose entries are attributes too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparkdl.arguments import listed
from sparkdl.errors import ModelError

OutputKey = str | int
"""Which of several outputs: its name, or its position in a tuple."""

Widths = Mapping[OutputKey | None, int | None]
"""Numbers per row of each output, None for an output without a dimension beyond the rows; a model's
only output has the key None."""

_DENSE = {
    "masked": "output.to_tensor(0.0)",
    "nested": "output.to_padded_tensor(0.0)",
    "quantized": "output.dequantize()",
    "meta": "one that has values",
}
"""What to return instead of some forms of tensors."""


def names_output(key: object) -> bool:
    """Whether something may be an ``OutputKey``, which has to survive JSON."""
    return isinstance(key, str) or (type(key) is int and key >= 0)


def parts_of(outputs: Any) -> dict[OutputKey, Any]:
    """Several outputs by name, or by position in a tuple or list, leaving out any that are None.

    Args:
        outputs: what a model has returned; a single tensor has no parts.
    """
    if isinstance(outputs, Mapping):
        parts = dict(outputs)
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        parts = {each.name: getattr(outputs, each.name) for each in dataclasses.fields(outputs)}
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        parts = dict(zip(outputs._fields, outputs, strict=True))
    elif isinstance(outputs, (tuple, list)):
        parts = dict(enumerate(outputs))
    else:
        parts = {}
    return {key: part for key, part in parts.items() if part is not None}


def pick(outputs: Any, key: OutputKey | None, rows: int) -> Tensor:
    """Take one output for each row.

    Args:
        outputs: what a model has returned.
        key: which output; None for the only one.
        rows: rows of the minibatch.

    Returns:
        A tensor of shape (rows, ...).

    Raises:
        ModelError: there is no such output, or it does not have one value per row.
    """
    found = outputs if key is None and isinstance(outputs, Tensor) else _part(outputs, key)
    name = "" if key is None else f" as its output {key!r}"
    if not isinstance(found, Tensor):
        raise ModelError(
            f"the model returns {described(found)}{name}, which is not a tensor and cannot become "
            "a column"
        )
    form = form_of(found)
    if form:
        raise ModelError(
            f"the model returns {described(found)}{name}, but columns are made of dense tensors. "
            f"Return {_DENSE.get(form, 'output.to_dense()')}"
        )
    if found.is_complex():
        raise ModelError(
            f"the model returns {described(found)}{name}, but columns hold real numbers. Return "
            "its absolute value, or torch.view_as_real of it"
        )
    if found.dim() == 0 or len(found) != rows:
        raise ModelError(
            f"the model returns shape {tuple(found.shape)}{name} for {rows} rows; the first "
            "dimension must be the rows"
        )
    return found


def _part(outputs: Any, key: OutputKey | None) -> Any:
    parts = parts_of(outputs)
    if key is not None and key in parts:
        return parts[key]
    if key is None and len(parts) == 1:
        return next(iter(parts.values()))
    if isinstance(outputs, Tensor):
        raise ModelError(
            f"outputCols asks for output {key!r}, but the model returns one tensor, "
            f"{described(outputs)}. Drop outputCols; predictionCol names its column"
        )
    if not parts:
        raise ModelError(
            f"the model returns {described(outputs)}; it must return a tensor of shape "
            "(rows, ...), or several in a tuple, dict or dataclass"
        )
    if key is None:
        raise ModelError(
            f"the model returns several outputs: {described(outputs)}. Choose which of them "
            f"transform adds, for example outputCols={{'prediction': {next(iter(parts))!r}}}"
        )
    raise ModelError(
        f"outputCols asks for output {key!r}, but the model returns {described(outputs)}"
    )


def widths_of(outputs: Any, rows: int) -> Widths:
    """Find out the width of each output that ``pick`` can take.

    Args:
        outputs: what a model has returned.
        rows: rows of the minibatch.
    """
    keys = [key for key in parts_of(outputs) if names_output(key)]
    widths: dict[OutputKey | None, int | None] = {}
    for key in (None, *keys):
        with suppress(ModelError):
            found = pick(outputs, key, rows)
            widths[key] = None if found.dim() == 1 else found[0].numel()
    return widths


def described(value: Any) -> str:
    """The dtype and shape of a tensor, or of several outputs with their names, for messages."""
    if isinstance(value, Tensor):
        form, kind = form_of(value), str(value.dtype).removeprefix("torch.")
        # The lengths of a nested tensor's rows differ.
        return f"{form} {kind}".lstrip() + ("" if value.is_nested else f" {tuple(value.shape)}")
    kind = type(value).__name__
    if not parts_of(value):
        return f"a {kind}"
    shown = (
        f"{key!r} {described(part)}"
        if isinstance(part, Tensor)
        else f"{key!r} ({type(part).__name__})"
        for key, part in parts_of(value).items()
    )
    return f"a {kind} of {listed(shown)}"


def form_of(tensor: Tensor) -> str:
    """How a tensor holds its numbers if that cannot become a column; else empty."""
    if isinstance(tensor, MaskedTensor):
        return "masked"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
