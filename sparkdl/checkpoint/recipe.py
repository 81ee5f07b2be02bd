"""How an object can be built again, as JSON: by import path and arguments instead of a pickle.

nn.ReLU                          {"import": "torch.nn.modules.activation:ReLU"}
partial(torch.optim.SGD, lr=.1)  {"partial": {"import": "torch.optim.sgd:SGD"}, "kwargs": ...}
ParameterAveraging(period=5)     {"new": {"import": ...}, "kwargs": {"period": 5, ...}}
nn.CrossEntropyLoss()            {"new": {"import": ...}, "kwargs": {"reduction": "mean", ...}}
anything else                    {"pickle": "<file>"}, loaded only if the user trusts it
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from sparkdl.errors import ConfigError

_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("sparkdl_trusted", default=False)


@contextlib.contextmanager
def trusted_pickles() -> Iterator[None]:
    """Allow pickles to be loaded inside a ``with`` block, for example by ``PipelineModel.load``.

    A pickle runs code of its author's choice: use it only on files that you trust.
    """
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def save_recipe(value: Any, directory: Path, name: str) -> dict[str, Any]:
    """Describe an object; write a pickle beside only if it cannot be described.

    Args:
        value: the object.
        directory: where a pickle may be written.
        name: of the object, for the file and for messages.

    Returns:
        The recipe, for JSON.
    """
    try:
        recipe = _describe(value)
    except _Indescribable:
        recipe = {}
    if not recipe or _needs_main(recipe):
        file = f"{name}.pkl"
        (directory / file).write_bytes(cloudpickle.dumps(value))
        recipe = {**recipe, "pickle": file}
    return {"recipe": recipe}


def load_recipe(saved: dict[str, Any], directory: Path, name: str, *, trust: bool) -> Any:
    """Build an object again.

    Args:
        saved: what ``save_recipe`` returned.
        directory: where it wrote.
        name: of the object, for messages.
        trust: whether a pickle may be loaded.

    Raises:
        ConfigError: the object was pickled and is not trusted, or cannot be imported here.
    """
    recipe = saved["recipe"]
    described = {key: value for key, value in recipe.items() if key != "pickle"}
    if described:
        try:
            return _build(described)
        except (ImportError, AttributeError) as error:
            if "pickle" not in recipe:
                raise ConfigError(
                    f"{name} was saved as {described}, which cannot be imported here: {error}. "
                    "Install the package that has it, or add it with spark.submit.pyFiles"
                ) from error
    if not (trust or _trusted.get()):
        raise ConfigError(
            f"{name} was saved as a pickle, because it is an instance or was defined in a notebook "
            "or script, not in a module that can be imported. A pickle runs code of its author's "
            "choice. If you trust the file, load with trust=True (TorchModel.load(path, "
            "trust=True)) or inside `with sparkdl.trusted_pickles():`; to do without, give "
            f"{name} as a class or function of an importable module"
        )
    path = directory / recipe["pickle"]
    if not path.is_file():
        raise ConfigError(f"{name} was saved as a pickle, but {path} is missing")
    return cloudpickle.loads(path.read_bytes())


class _Indescribable(Exception):
    """The object, or part of it, has no description."""


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_describe(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(item) for key, item in value.items()}}
    if isinstance(value, functools.partial):
        return {
            "partial": _describe(value.func),
            "args": [_describe(item) for item in value.args],
            "kwargs": {key: _describe(item) for key, item in value.keywords.items()},
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return _new(value, fields)
    if isinstance(value, torch.nn.modules.loss._Loss):
        return _new(value, _loss_arguments(value))
    return {"import": _import_path(value)}


def _new(value: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "new": {"import": _import_path(type(value))},
        "kwargs": {key: _describe(item) for key, item in arguments.items()},
    }


def _loss_arguments(loss: torch.nn.modules.loss._Loss) -> dict[str, Any]:
    """A torch loss keeps its constructor's arguments as attributes of the same names."""
    if type(loss).__module__ != "torch.nn.modules.loss":
        raise _Indescribable(loss)
    deprecated = {"self", "size_average", "reduce"}
    names = [n for n in inspect.signature(type(loss).__init__).parameters if n not in deprecated]
    missing = object()
    found = {name: getattr(loss, name, missing) for name in names}
    if missing in found.values():
        raise _Indescribable(loss)
    return found


def _import_path(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or "<" in name:
        raise _Indescribable(value)
    try:
        found = _import(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise _Indescribable(value) from error
    if found is not value:
        raise _Indescribable(value)
    return f"{module}:{name}"


def _import(path: str) -> Any:
    module, name = path.split(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _needs_main(recipe: Any) -> bool:
    """Whether part of a recipe lives in the running script, which another script will not have."""
    if isinstance(recipe, dict):
        return any(
            (key == "import" and str(value).startswith("__main__:")) or _needs_main(value)
            for key, value in recipe.items()
        )
    return isinstance(recipe, list) and any(_needs_main(item) for item in recipe)


def _build(recipe: Any) -> Any:
    if not isinstance(recipe, dict):
        return recipe
    if "import" in recipe:
        return _import(recipe["import"])
    if "tuple" in recipe:
        return tuple(_build(item) for item in recipe["tuple"])
    if "list" in recipe:
        return [_build(item) for item in recipe["list"]]
    if "dict" in recipe:
        return {key: _build(item) for key, item in recipe["dict"].items()}
    arguments = {key: _build(item) for key, item in recipe["kwargs"].items()}
    if "new" in recipe:
        return _build(recipe["new"])(**arguments)
    positional = [_build(item) for item in recipe["args"]]
    return functools.partial(_build(recipe["partial"]), *positional, **arguments)
