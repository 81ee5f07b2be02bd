"""Converters that check what users set; the error of each names the setting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sparkdl.arguments import as_number, plain, require_seed, require_whole
from sparkdl.errors import ConfigError


def whole(name: str, minimum: int) -> Any:
    """A whole number, at least ``minimum``."""
    return lambda value: require_whole(name, value, minimum)


def any_seed(name: str) -> Any:
    """A seed."""
    return lambda value: require_seed(name, value)


def switch(name: str) -> Any:
    """True or False."""

    def convert(value: Any) -> bool:
        given = plain(value)
        if not isinstance(given, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        return given

    return convert


def optional(convert: Callable[[Any], Any]) -> Any:
    """None, or what ``convert`` makes of it."""
    return lambda value: None if value is None else convert(value)


def positive(name: str) -> Any:
    """A number above 0."""

    def convert(value: Any) -> float:
        number = as_number(value)
        if number is None or not number > 0:
            raise ConfigError(f"{name} must be a number > 0, got {value!r}")
        return float(number)

    return convert


def fraction(name: str) -> Any:
    """A number strictly between 0 and 1."""

    def convert(value: Any) -> float:
        number = as_number(value)
        if number is None or not 0 < number < 1:
            raise ConfigError(f"{name} must be a number between 0 and 1, got {value!r}")
        return float(number)

    return convert


def one_of(name: str, allowed: tuple[str, ...]) -> Any:
    """One of some words."""

    def convert(value: Any) -> str:
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        return str(value)

    return convert


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


def nonempty_text(name: str) -> Any:
    """A non-empty text."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name} must be a name, got {value!r}")
        return value

    return convert
