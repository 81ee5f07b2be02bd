"""Advice for when a model cannot be built or fails on a batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import NoReturn

import torch

from sparkdl.errors import ModelError
from sparkdl.feed.columns.ragged import sequence_names
from sparkdl.feed.record_batches.decode import in_sql
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.replica import Replica
from sparkdl.replica.losses import ModelLoss
from sparkdl.user_code.tracebacks import message_of, text_of

SHOW_ZEROS = "Give a function as model that builds it and calls it on a batch of zeros"

_OF_SHAPE = re.compile(r"\b[2-5]D\b|channels")
_OF_BYTES = re.compile(r"unsigned char|\bByte\b|uint8")
_OF_EMPTY = re.compile(r"greater than 0|<= 0|empty|zero")
_OF_RATE = re.compile(r"(?:missing|required).*\blr\b")
_OF_MASK = re.compile("bool", re.IGNORECASE)


def how_to_build(error: Exception) -> str:
    """What to pass as model or optimizer if these cannot be built; empty for most errors."""
    text = text_of(error)
    # Raised for an instance, since torch cannot copy every one.
    if "uninitialized parameter" in text:
        return f". {SHOW_ZEROS}"
    if "deepcopy protocol" in text:
        return ". Give a function as model that builds it, instead of an instance"
    if _OF_RATE.search(text):
        return ". Give the optimizer its learning rate with learningRate"
    if "process group" in text:
        return (
            ". The strategy synchronizes the replicas: remove DistributedDataParallel and similar "
            "wrappers from the model"
        )
    return ""


def how_called(replica: Replica, batch: Batch, error: Exception, *, with_labels: bool) -> str:
    """The call and what the model takes, to end an error message; empty for other errors.

    Args:
        replica: the model's.
        batch: what it was called with.
        error: what it raised.
        with_labels: whether it was given the labels for a loss of its own.
    """
    if not isinstance(error, (TypeError, AttributeError)):
        return ""
    features, advice = batch.features, ""
    if not isinstance(features, dict):
        given = ["..." for _ in features]
    elif replica.features_as_kwargs:
        given = [f"{name}=..." for name in features]
    else:
        given = [f"{{{', '.join(f'{name!r}: ...' for name in features)}}}"]
        advice = (
            ". Drop featuresAsDict to pass the features as separate arguments, or set "
            "featuresAsKwargs instead to pass them by name"
        )
    if with_labels and isinstance(replica.loss, ModelLoss):
        given += [f"{name}=..." for name in replica.loss.keywords]
    try:
        taken = inspect.signature(replica.module.forward).parameters
        takes = f", and its forward takes ({', '.join(taken)})"
    except (TypeError, ValueError):  # a callable written in C may have no signature
        takes = ""
    return f". It was called as model({', '.join(given)}){takes}{advice}"


def which_param_helps(
    error: Exception, features: Sequence[ColumnSpec], statistics: Sequence[ColumnStatistics]
) -> str:
    """The Param to set if dimensions, floats or booleans are missing; empty for other errors.

    Args:
        error: what the model raised.
        features: what it was given.
        statistics: what is known about each, and perhaps about further columns.
    """
    pixels = [
        spec.name
        for spec in features
        if spec.encoding.dimension_names and spec.dtype == torch.uint8 and spec.scale is None
    ]
    if pixels and _OF_BYTES.search(text_of(error)):
        return (
            f". Images are fed as bytes; for a model of floats: imageCols={pixels}, and imageScale="
            "'0..1', '0..255' or (mean, std)"
        )
    flat = [s.name for s in features if len(s.row_shape) == 1 and s.padding is None]
    if flat and _OF_SHAPE.search(text_of(error)):
        return (
            f". Rows of '{flat[0]}' are flat; to give them a shape, as for images: "
            f"columnShapes={{'{flat[0]}': [channels, height, width]}}"
        )
    zero_or_one = [
        spec.name
        for spec, found in zip(features, statistics, strict=False)
        if spec.dtype == torch.int64 and (found.smallest, found.largest) in ((0, 0), (0, 1), (1, 1))
    ]
    if zero_or_one and _OF_MASK.search(text_of(error)):
        masks = ", ".join(f"'{name}': 'bool'" for name in zero_or_one)
        return f". Booleans are fed as int64; to use them as masks: columnDtypes={{{masks}}}"
    return ""


def what_padding_adds(
    error: Exception, features: Sequence[ColumnSpec], statistics: Sequence[ColumnStatistics]
) -> str:
    """What padded features may be to blame for: inputs that are added, or rows without an item.

    Args:
        error: what the model raised.
        features: what it was given.
        statistics: what is known about each, and perhaps about further columns.
    """
    padded = [
        (spec.name, spec.padding, found)
        for spec, found in zip(features, statistics, strict=False)
        if spec.padding is not None
    ]
    empty = [(name, found.where("shortest")) for name, _, found in padded if found.shortest == 0]
    if empty and _OF_EMPTY.search(text_of(error)):
        name, where = empty[0]
        return (
            f". '{name}' is empty in {where}. Leave such rows out: "
            f"df.where(F.size('{in_sql(name)}') > 0)"
        )
    added = sequence_names(features)
    masks = any(padding.input == "padding_mask" for _, padding, _ in padded)
    if not added or "index out of range" in text_of(error):  # of an embedding
        return ""
    if not masks and not isinstance(error, (TypeError, AttributeError)):
        return ""
    last, say = ("input", "says") if len(added) == 1 else ("inputs", "say")
    return (
        f". The last {last}, {', '.join(added)}, {say} where rows are padded because of padCols"
        f"{' (a mask, True there)' if masks else ''}: padInputs={{'{padded[0][0]}': 'lengths'}} "
        "gives their lengths, 'attention_mask' the opposite mask, and padInputs={} nothing"
    )


def fail(what: str, error: Exception, advice: str = "") -> NoReturn:
    """Report that the user's model, loss or optimizer has failed.

    Args:
        what: what has failed, and on what.
        error: what it raised.
        advice: what helps, with its leading punctuation.

    Raises:
        ModelError: always.
    """
    text = message_of(error).removesuffix(".") if advice else message_of(error)
    raise ModelError(f"{what}: {text}{advice}") from error
