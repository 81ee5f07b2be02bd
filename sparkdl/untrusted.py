"""JSON that anybody may have written, read as the dataclasses of which it was made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sparkdl.events import are_measured, are_metrics

_COUNTS, _NUMBERS = range(1 << 64), range(-(1 << 63), 1 << 64)
"""What fits in 64 bits. JSON's integers may be too large for a float, so sums would fail."""
_BY_NAME = {"metrics": are_metrics, "measured": are_measured}
"""Fields that hold numbers by name, and the checks for them."""
_is_ours: Callable[[Any], bool] = is_dataclass
_hints_of: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def read(hint: Any, value: Any, name: str = "it") -> Any:
    """A value of JSON as what a type hint says.

    Args:
        hint: a dataclass, of which fields with a default may be missing; a dict with the hint of
            each field; or what fields consist of. Integers are counts, and floats may be integers.
        value: from JSON.
        name: of the field, for the error.

    Raises:
        TypeError: it is something else; the message shows it.
    """
    kind = type(value)
    if hint is kind and (kind is not int or value in _COUNTS):
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if name in _BY_NAME:
        fits = _BY_NAME[name](value)
    elif origin in (Union, UnionType):  # of something and None
        return None if value is None else read(arguments[0], value, name)
    elif arguments[1:] == (...,) and kind in (list, tuple):
        return tuple(read(arguments[0], each, name) for each in value)
    elif origin is tuple and kind in (list, tuple) and len(value) == len(arguments):
        return tuple(read(*pair, name) for pair in zip(arguments, value, strict=True))
    elif origin is list and kind is list:
        return [read(arguments[0], each, name) for each in value]
    elif origin in (dict, Mapping) and kind is dict:
        return {key: read(arguments[1], each, name) for key, each in value.items()}
    elif isinstance(hint, dict) and kind is dict and value.keys() == hint.keys():
        return {key: read(each, value[key], key) for key, each in hint.items()}
    elif kind is dict and _is_ours(hint) and value.keys() <= _hints_of(hint).keys():
        hints = _hints_of(hint)
        return hint(**{key: read(hints[key], each, key) for key, each in value.items()})
    elif origin is Literal:
        fits = value in arguments
    else:
        fits = hint is object or (hint is float and kind is int and value in _NUMBERS)
    if not fits:
        raise TypeError(f"{name} is {value!r:.200}")
    return value
