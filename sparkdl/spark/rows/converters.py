"""Converters that check what users set; the error of each names the setting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from sparkdl.arguments import as_list, as_number, as_whole, plain
from sparkdl.encodings.scale import LARGEST
from sparkdl.errors import ConfigError
from sparkdl.outputs import OutputKey, names_output
from sparkdl.protocols import SequenceInput

T = TypeVar("T")

_WHOLE = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = ("float16", "bfloat16", "float32", "float64", *_WHOLE, "bool")
"""The dtypes that ``columnDtypes`` accepts, by their torch names."""


def refusing(wanted: str, convert: Callable[[Any], T | None]) -> Callable[[Any], T]:
    """A converter that refuses what another one makes nothing of.

    Args:
        wanted: the beginning of the error, up to what was given.
        convert: returns None for what it does not take.
    """

    def checked(value: Any) -> T:
        found = convert(value)
        if found is None:
            raise ConfigError(f"{wanted}, got {value!r:.1000}")
        return found

    return checked


def optional(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """None, or what ``convert`` makes of it."""
    return lambda value: None if value is None else convert(value)


def switch(name: str) -> Any:
    """True or False."""
    return refusing(f"{name} must be True or False", lambda value: _of(bool, plain(value)))


def positive(name: str, below: float = math.inf) -> Any:
    """A number above 0, and below another."""
    bounds = "> 0" if below == math.inf else f"between 0 and {below}"

    def convert(value: Any) -> float | None:
        number = as_number(value)
        return float(number) if number is not None and 0 < number < below else None

    return refusing(f"{name} must be a number {bounds}", convert)


def one_of(name: str, allowed: Sequence[str]) -> Any:
    """One of some words."""
    wanted = f"{name} must be one of {', '.join(allowed)}"
    return refusing(wanted, lambda value: str(value) if value in allowed else None)


def nonempty_text(name: str, what: str = "a name") -> Any:
    """A non-empty text."""
    return refusing(f"{name} must be {what}", lambda value: _of(str, value) or None)


def _of(kind: type[T], value: Any) -> T | None:
    return value if isinstance(value, kind) else None


def device_name(name: str) -> Any:
    """A torch device, or one that each task chooses."""
    pattern = re.compile(r"auto|cpu|cuda(:\d+)?")
    return refusing(
        f"{name} must be auto, cpu, cuda or cuda:N",
        lambda value: str(value) if pattern.fullmatch(str(value)) else None,
    )


def function(name: str, what: str, *, builds: bool = False) -> Any:
    """Something that can be called.

    Args:
        name: the setting.
        what: what it should be.
        builds: whether it is called to build something, and so may be a class.
    """

    def convert(value: Any) -> Any:
        called = value
        while isinstance(called, partial):
            called = called.func
        if not callable(called) or (isinstance(called, type) and not builds):
            raise ConfigError(f"{name} must be {what}, got {got(called)}")
        return value

    return convert


def got(value: Any) -> str:
    """What was given in place of something else."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself: call it, {value.__name__}(...)"
    return repr(value) if isinstance(value, str) else f"one of type {type(value).__name__}"


def numbers(value: Any) -> list[float] | None:
    """Floats, of whatever kind the numbers are; None if one is none, or there is no list."""
    given = as_list(value)
    found = [as_number(each) for each in given or ()]
    wrong = given is None or None in found
    return None if wrong else [float(each) for each in found if each is not None]


def names(param: str) -> Callable[[Any], list[str] | None]:
    """A list of column names, or None."""

    def convert(value: Any) -> list[str] | None:
        given = as_list(value) or [None]
        return [str(name) for name in given] if all(isinstance(n, str) for n in given) else None

    return optional(refusing(f"{param} must be a list of column names", convert))


def _by_column(
    wanted: str, convert: Callable[[Any], T | None], *, may_be_empty: bool = True
) -> Callable[[Any], dict[str, T] | None]:
    """A dict by column, or None.

    Args:
        wanted: the beginning of the error.
        convert: of what is given for a column; returns None for what it does not take.
        may_be_empty: whether there may be no column.
    """

    def check(value: Any) -> dict[str, T] | None:
        items = value.items() if isinstance(value, dict) else ()
        given = {str(name): convert(each) for name, each in items}
        sound = {name: each for name, each in given.items() if each is not None}
        wrong = not isinstance(value, dict) or not (given or may_be_empty)
        return None if wrong or len(sound) < len(value) else sound

    return optional(refusing(wanted, check))


def _shape(value: Any) -> list[int | None] | None:
    """Whole numbers > 0, of which the first may be None."""
    given = as_list(value)
    sizes = [None if each is None else as_whole(each) or 0 for each in given or ()]
    wrong = any(place > 0 if size is None else size < 1 for place, size in enumerate(sizes))
    return None if given is None or wrong else sizes


def _size(value: Any) -> list[int] | None:
    sizes = [as_whole(each) or 0 for each in as_list(value) or ()]
    return sizes if len(sizes) == 2 and min(sizes) > 0 else None


def _scale(value: Any) -> str | list[list[float]] | None:
    """The name of a scale, or mean and std as lists."""
    if isinstance(value, str):
        return value if value in LARGEST else None
    given = [numbers(as_list(each) or [each]) for each in as_list(value) or ()]
    parts = [each for each in given if each is not None]
    return parts if len(given) == len(parts) == 2 and min(parts[1]) > 0 else None


def _output(value: Any) -> OutputKey | None:
    key: OutputKey = plain(value)
    return key if names_output(key) else None


_INPUTS = get_args(SequenceInput)

shapes = _by_column(
    "columnShapes must give for each column the shape of one row in whole numbers > 0, for example "
    "{'image': [3, 32, 32]}, and None for the length of padded rows",
    _shape,
)
dtypes = _by_column(
    f"columnDtypes must give for each column one of {', '.join(DTYPES)}",
    lambda name: str(name) if name in DTYPES else None,
)
paddings = _by_column(
    "padCols must give for each column the number that shorter rows are padded with, for example "
    "{'tokens': 0}",
    as_number,
    may_be_empty=False,
)
pad_inputs: Callable[[Any], dict[str, SequenceInput] | None] = _by_column(
    f"padInputs must give for columns of padCols one of {', '.join(_INPUTS)}, for example "
    "{'tokens': 'lengths'}",
    lambda kind: kind if kind in _INPUTS else None,
)
outputs = _by_column(
    "outputCols must give for each column the name of the model's output or its position in a "
    "tuple, for example {'prediction': 'logits', 'embedding': 1}",
    _output,
    may_be_empty=False,
)
image_size = optional(
    refusing(
        "imageSize must give the height and the width that images are brought to, in whole "
        "numbers > 0, for example (224, 224)",
        _size,
    )
)
image_scale = optional(
    refusing(
        f"imageScale must be {', '.join(map(repr, LARGEST))}, or (mean, std) of pixels from 0 to "
        "1, each a number or a list of one for every channel, std > 0, for example ([0.485, "
        "0.456, 0.406], [0.229, 0.224, 0.225])",
        _scale,
    )
)
