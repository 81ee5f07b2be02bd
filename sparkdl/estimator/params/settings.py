"""A fit's Params as text, for reports and experiment trackers."""

from __future__ import annotations

import functools
import reprlib
from typing import Any

from pyspark.ml.param import Params
from torch import nn

from sparkdl.redaction import without_credentials

LONGEST = 500
"""The most characters of one value; MLflow, for one, refuses more than 6000."""


def settings_of(stage: Params) -> dict[str, object]:
    """The values of a stage's Params, defaults included.

    Returns:
        The values by name: numbers, booleans and None as they are, all others as text.
    """
    return {
        param.name: described(stage.getOrDefault(param))
        for param in stage.params
        if stage.isDefined(param)
    }


def described(value: Any) -> object:
    """A value as a person would write it, as far as possible."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _text(value)[:LONGEST]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, functools.partial):
        arguments = [_brief(each) for each in value.args]
        arguments += [f"{name}={_brief(each)}" for name, each in value.keywords.items()]
        return f"{_text(value.func)}({', '.join(arguments)})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_brief(each) for each in value)}]"
    return _brief(value)


def _brief(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    try:
        text = _Repr().repr(value) if isinstance(value, (dict, set)) else repr(value)
    except Exception:  # a user's object need not be able to describe itself
        text = object.__repr__(value)
    # An address says nothing, and differs in each fit.
    if " object at 0x" in text:
        return type(value).__name__
    return without_credentials(text)[:LONGEST]


class _Repr(reprlib.Repr):
    """Cuts texts only once they have no credentials."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_credentials(x), level)
