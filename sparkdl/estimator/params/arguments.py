"""Constructors whose arguments are Params."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from sparkdl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., None])
_WITHOUT_NONE = ("strategy", "weightCol", "validationIndicatorCol", "thresholds")
"""Arguments that may be None although their Params may not."""


def arguments_are_params(
    init: F, *, like: Callable[..., None] | None = None, without: tuple[str, ...] = ()
) -> F:
    """Make each argument's default its Param's, set those that are given, and refuse others.

    Args:
        init: a constructor; with ``**params`` it has the arguments of another one too.
        like: the other one.
        without: the arguments of that one to leave out.
    """
    own = inspect.signature(init)
    parameters = {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
    if like is not None:
        others = inspect.signature(like).parameters
        parameters |= {n: p for n, p in others.items() if n not in (*parameters, *without)}
    signature = own.replace(parameters=list(parameters.values()))
    del parameters["self"]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    needed = [name for name in parameters if name not in defaults]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self).__name__
        for name in kwargs:
            if name not in parameters:
                close = difflib.get_close_matches(name, parameters, n=1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                raise ConfigError(
                    f"{kind} has no parameter '{name}'.{hint} It has: {', '.join(parameters)}"
                )
        if like is not None and (missing := [name for name in needed if name not in kwargs]):
            raise TypeError(f"{kind} needs {', '.join(missing)}")
        init(self, *args, **kwargs)
        # pyspark.ml's own Params cannot be None; one that is not set is not used.
        self._setDefault(**{n: v for n, v in defaults.items() if n not in _WITHOUT_NONE})
        self._set(**{n: v for n, v in kwargs.items() if v is not None or n not in _WITHOUT_NONE})

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]
