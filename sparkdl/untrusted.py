"""JSON that anybody may have written, read as the dataclasses of which it was made."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from sparkdl.events import are_measured, are_metrics

_COUNTS, _NUMBERS = range(1 << 63), range(-(1 << 63), 1 << 64)
"""What fits in 64 bits. JSON's integers may be too large for a float, so sums would fail."""
_BY_NAME = {"metrics": are_metrics, "measured": are_measured}
"""Fields that hold numbers by name, and the checks for them."""


def read(hint: Any, value: Any, name: str = "it", *, whole: bool = False) -> Any:
    """A value of JSON as what a type hint says.

    Args:
        hint: a dataclass, of which fields with a default may be missing; a dict with the hint of
            each field; or what fields consist of. Integers are counts, and floats may be integers.
        value: from JSON.
        name: of the field, for the error. A fingerprint may have all 64 bits.
        whole: whether no field may be missing.

    Raises:
        TypeError: it is something else; the message shows it.
    """
    kind = type(value)
    if hint is kind and (kind is not int or value in _COUNTS):
        return value
    if isinstance(hint, dict):
        if kind is dict and value.keys() == hint.keys():
            return {key: read(each, value[key], key, whole=whole) for key, each in hint.items()}
        raise TypeError(f"{name} is {value!r:.200}")
    hints, plain, origin, arguments = _form_of(hint)
    if hints is not None:
        missing = len(hints) - len(value) if kind is dict and value.keys() <= hints.keys() else None
        if missing == 0 or (missing and not whole):
            # Most fields are plain, and every contribution brings eleven.
            fields = {
                key: each
                if (kind := type(each)) in plain[key] and (kind is not int or each in _COUNTS)
                else read(hints[key], each, key, whole=whole)
                for key, each in value.items()
            }
            return hint(**fields)
        fits = False
    elif name in _BY_NAME:
        fits = _BY_NAME[name](value)
    elif origin in (Union, UnionType):  # of something and None
        return None if value is None else read(arguments[0], value, name, whole=whole)
    elif arguments[1:] == (...,) and kind in (list, tuple):
        return tuple([read(arguments[0], each, name, whole=whole) for each in value])
    elif origin is tuple and kind in (list, tuple) and len(value) == len(arguments):
        return tuple(
            [read(*pair, name, whole=whole) for pair in zip(arguments, value, strict=True)]
        )
    elif origin is list and kind is list:
        return [read(arguments[0], each, name, whole=whole) for each in value]
    elif origin is np.ndarray:
        return np.asarray(value, get_args(arguments[1])[0])
    elif origin in (dict, Mapping) and kind is dict:
        return {key: read(arguments[1], each, name, whole=whole) for key, each in value.items()}
    elif origin is Literal:
        fits = value in arguments
    else:
        numbers = _NUMBERS if hint is float else range(1 << 64) if "fingerprint" in name else ()
        fits = hint is object or (kind is int and hint in (int, float) and value in numbers)
    if not fits:
        raise TypeError(f"{name} is {value!r:.200}")
    return value


@functools.cache
def _form_of(
    hint: Any,
) -> tuple[dict[str, Any] | None, dict[str, set[Any]], Any, tuple[Any, ...]]:
    """The hints of a dataclass's fields, or None, with their plain types; what a type is of."""
    hints = get_type_hints(hint) if is_dataclass(hint) else None
    plain = {
        key: {*(get_args(each) or (each,))} & {int, float, str, bool, NoneType}
        if get_origin(each) in (None, Union, UnionType)
        else set()
        for key, each in (hints or {}).items()
    }
    return hints, plain, get_origin(hint), get_args(hint)
