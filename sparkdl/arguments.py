"""Numbers as users give them, converted to Python's own: one rule for every argument and Param.

A whole number may be an int, one of numpy's or torch's, or a float without a fraction; a number may
also be a Decimal or a Fraction. A bool is no number, but may be numpy's. What is converted can be
compared, written as JSON and told in messages like any other.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from sparkdl.errors import ConfigError

_SEEDS = range(-(2**63), 2**63)
"""What Spark, torch, numpy and Python all take."""
LISTED = 50
"""The most names that a message lists."""


def plain(value: Any) -> Any:
    """Python's own number or bool of the same value; anything else as it is."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    try:
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if isinstance(value, (numbers.Real, Decimal)) else value
    except (OverflowError, ValueError):  # beyond what a float holds, or a signaling NaN
        return value


def as_whole(value: Any) -> int | None:
    """A whole number as an int; None if it is none."""
    value = plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: Any) -> float | None:
    """A finite number as an int or float; None if it is none."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int beyond what a float holds
        return None


def as_list(value: Any) -> list[Any] | None:
    """The elements of a list, tuple, array, tensor, or of pandas' index or series; else None."""
    if isinstance(value, (list, tuple)):
        return list(value)
    # Asked of the class, since a Column has every attribute.
    elements = value.tolist() if hasattr(type(value), "tolist") else None
    return elements if isinstance(elements, list) else None


def require_whole(name: str, value: Any, least: int, of: str = "") -> int:
    """Convert an argument that must be a whole number.

    Args:
        name: the argument.
        value: as it was given.
        least: the smallest that it may be.
        of: what is counted, for the message.

    Raises:
        ConfigError: it is not.
    """
    number = as_whole(value)
    if number is None or number < least:
        counted = f" of {of}" if of else ""
        raise ConfigError(f"{name} must be a whole number{counted} >= {least}, got {value!r}")
    return number


def require_positive(name: str, value: Any, *, or_zero: bool = False) -> float:
    """Convert an argument that must be a finite number > 0, or >= 0.

    Raises:
        ConfigError: it is not.
    """
    number = as_number(value)
    if number is None or number < 0 or (number == 0 and not or_zero):
        raise ConfigError(f"{name} must be a number {'>=' if or_zero else '>'} 0, got {value!r}")
    return number


def require_seed(name: str, value: Any) -> int:
    """Convert an argument that must be a seed.

    Raises:
        ConfigError: it is none.
    """
    seed = as_whole(value)
    if seed is None or seed not in _SEEDS:
        raise ConfigError(f"{name} must be a whole number >= -2**63 and < 2**63, got {value!r}")
    return seed


def counted(number: int, noun: str) -> str:
    """So many of something, for a message: "1 row", "2000 rows", "3 hashes"."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "tch")) else "s"
    return f"{number} {noun}{ending}"


def listed(shown: Iterable[str]) -> str:
    """Names for a message, of thousands the first ones: "a, b, c and 997 more"."""
    every = list(shown)
    first = ", ".join(every[:LISTED])
    return first if len(every) <= LISTED else f"{first} and {len(every) - LISTED} more"


def convert_numbers(owner: Any, fields: Iterable[dataclasses.Field[Any]] | None = None) -> None:
    """Convert the numbers and bools in the fields of a dataclass, before they are checked.

    Floats without a fraction become ints where only an int is declared.

    Args:
        owner: it may be frozen.
        fields: which of its fields; None for all.
    """
    for field in dataclasses.fields(owner) if fields is None else fields:
        declared = set(re.findall(r"\w+", str(field.type)))
        whole = "float" not in declared and not declared.isdisjoint(_WHOLE)
        given = getattr(owner, field.name)
        converted = _converted(given, whole)
        if converted is not given:
            object.__setattr__(owner, field.name, converted)


_WHOLE = ("int", "Cutoff", "Periods")
"""What the annotations of fields call types that hold ints and no floats."""


def _converted(value: Any, whole: bool) -> Any:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        found = type(value)(_converted(each, whole) for each in value)
        return value if all(a is b for a, b in zip(found, value, strict=True)) else found
    number = plain(value)
    if whole and isinstance(number, float) and number.is_integer():
        return int(number)
    return number
