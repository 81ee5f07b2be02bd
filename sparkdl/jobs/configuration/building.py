"""Builds the objects that a configuration names by ``class_path`` and ``init_args``.

This is not left to jsonargparse: workers must build replicas without it, models saved with their
builder load without a pickle, and pyspark.ml's stages need a session before they are made.
"""

from __future__ import annotations

import inspect
import pkgutil
from functools import partial
from typing import Any

from jsonargparse import Namespace
from pyspark.errors import IllegalArgumentException
from pyspark.ml.wrapper import JavaParams

from sparkdl.errors import ConfigError


def built(spec: Any) -> Any:
    """The object that a specification describes.

    Args:
        spec: a ``Namespace`` with ``class_path`` and ``init_args``, a list or dict of those, or any
            other value, which is returned unchanged.
    """
    if is_spec(spec):
        called = builder(spec)
        return called()
    if isinstance(spec, Namespace):
        return built(spec.as_dict())
    if isinstance(spec, dict):
        return {name: built(each) for name, each in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(built(each) for each in spec)
    return spec


def checked_stage(place: str, spec: Any) -> Any:
    """One of pyspark.ml's stages or evaluators, whose values its Java class has accepted.

    Python passes them to Java only when the stage is used, for an evaluator after a training.

    Args:
        place: its place in the configuration.
        spec: as for ``built``.

    Raises:
        ConfigError: an argument is not one that it takes.
    """
    try:
        stage = built(spec)
        if isinstance(stage, JavaParams):
            stage._transfer_params_to_java()
    except (IllegalArgumentException, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error
    return stage


def builder(spec: Any) -> Any:
    """What makes the object: the class or function, with its arguments; other values unchanged."""
    if not is_spec(spec):
        return built(spec)
    called = pkgutil.resolve_name(spec.class_path)
    arguments = spec.get("init_args")
    given = {name: built(value) for name, value in vars(arguments).items()} if arguments else {}
    # jsonargparse's name for the arguments that only a constructor's **kwargs take.
    given |= built(spec.get("dict_kwargs") or {})
    defaults = {name: p.default for name, p in inspect.signature(called).parameters.items()}
    # pyspark.ml's stages do not take None, so what was not given is left out.
    given = {
        name: value
        for name, value in given.items()
        if value is not None or defaults.get(name, inspect.Parameter.empty) is not None
    }
    return partial(called, **given) if given else called


def is_spec(value: Any) -> bool:
    """Whether a value describes an object to build."""
    return isinstance(value, Namespace) and "class_path" in value
