"""How to rebuild an object, as JSON: by import path and arguments instead of a pickle.

nn.ReLU                          {"import": "torch.nn.modules.activation:ReLU"}
partial(torch.optim.SGD, lr=.1)  {"partial": {"import": "torch.optim.sgd:SGD"}, "kwargs": ...}
ParameterAveraging(period=5)     {"new": {"import": ...}, "kwargs": {"period": 5, ...}}
nn.CrossEntropyLoss()            {"new": {"import": ...}, "kwargs": {"reduction": "mean", ...}}
anything else                    {"pickle": "<file>"}, loaded only if the user trusts it

``trust`` lists what a spec may name without the user's trust.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import pickle
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparkdl.checkpoint import identity
from sparkdl.checkpoint.trust import NotFoundError, Trust, TrustArgument, find, torchs_own
from sparkdl.errors import ConfigError
from sparkdl.user_code.needed_modules import pickled
from sparkdl.user_code.tracebacks import message_of

KEY = "recipe"
"""The key of a spec in files: what it was called when the first were written."""
DEEPEST = 64
"""How deeply a spec may be nested; anything deeper is pickled."""

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 200


@dataclass(frozen=True)
class Expected:
    """What was saved under a name, and hence what loading has to return.

    Attributes:
        what: a description for messages.
        base: the class of the object, or of what it builds.
        instance: whether it may be an instance of ``base``.
        maker: whether it may be a subclass of ``base`` or a trusted function, to be called for an
            instance.
        function: whether it may be a function that is called for something else.
        several: whether it is a list of such objects.
        harmless: what needs no trust besides torch's own, by import path.
    """

    what: str
    base: type
    instance: bool = False
    maker: bool = False
    function: bool = False
    several: bool = False
    harmless: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, value: Any, trust: Trust) -> bool:
        """Whether an object is what is expected."""
        if self.several:
            one = replace(self, several=False)
            return isinstance(value, list) and all(one.takes(each, trust) for each in value)
        if isinstance(value, self.base):
            return self.instance
        called = value.func if isinstance(value, functools.partial) else value
        if isinstance(called, type):
            return self.maker and issubclass(called, self.base)
        trusted = trust.covers(str(getattr(called, "__module__", None)))
        return callable(called) and (self.function or (self.maker and trusted))


MODEL = Expected(
    "an nn.Module, or a class or function that builds one",
    torch.nn.Module,
    instance=True,
    maker=True,
)
LOSS = Expected("an nn.Module or a function", torch.nn.Module, instance=True, function=True)


def save_object(value: Any, directory: Path, name: str) -> dict[str, Any]:
    """Describe an object; write a pickle only if it cannot be described.

    Args:
        value: the object.
        directory: where a pickle may be written.
        name: the object's name, for the file and for messages.

    Returns:
        The spec, for JSON.
    """
    try:
        spec = _describe(value)
    except _Indescribable:
        spec = None
    paths: list[str] = []
    _walk(spec, name, paths.append, build=False)
    # What lives in the running script is not in another.
    if not spec or any(path.startswith("__main__:") for path in paths):
        file = _pickle_of(name)
        (directory / file).write_bytes(pickled(value, set()))
        spec = {**(spec or {}), "pickle": file}
    return {KEY: spec}


def load_object(
    saved: Any, directory: Path, name: str, *, expected: Expected, trust: TrustArgument
) -> Any:
    """Rebuild an object.

    Nothing is imported or called until every name in the spec is known to be harmless or trusted.

    Args:
        saved: what ``save_object`` returned.
        directory: where it wrote.
        name: the object's name, for messages.
        expected: what the object has to be.
        trust: True for everything, pickles included, or the modules that may be imported.

    Raises:
        ConfigError: the spec is damaged, names something untrusted, cannot be imported here, or
            does not give what is expected.
    """
    trusted = Trust.of(trust)
    spec = saved.get(KEY) if isinstance(saved, dict) else None
    if not isinstance(spec, dict) or not spec:
        raise ConfigError(
            f"{name} was saved as {_shortened.repr(saved)}, which is not an object spec"
        )
    described = {key: value for key, value in spec.items() if key != "pickle"}
    try:
        found = _find_all(described, name, expected, trusted) if described else None
    except ConfigError:
        if "pickle" not in spec:
            raise
        found = None
    if found is None:
        return _load_pickle(spec["pickle"], directory, name, trusted)
    try:
        value = _walk(described, name, found.__getitem__, build=True)
    except Exception as error:  # a constructor may raise anything
        raise ConfigError(f"{name} cannot be built as it was saved: {message_of(error)}") from error
    if trusted.everything or expected.takes(value, trusted):
        return value
    raise ConfigError(f"{name} must be {expected.what}, but {_shortened.repr(described)} was saved")


def _find_all(spec: dict[str, Any], name: str, expected: Expected, trust: Trust) -> dict[str, Any]:
    """What the names in a spec stand for; imports nothing if one of them is not trusted."""
    harmless = {**torchs_own(), **expected.harmless}
    paths: list[str] = []
    _walk(spec, name, paths.append, build=False)
    module_of = {path: path.partition(":")[0] for path in paths if path not in harmless}
    unknown = sorted({module for module in module_of.values() if not trust.covers(module)})
    if unknown:
        names = ", ".join(path for path, module in module_of.items() if module in unknown)
        shown = _shortened.repr(unknown)
        raise ConfigError(
            f"{name} was saved as {_shortened.repr(names)}, which is not torch's own: loading it "
            f"imports {shown} and calls what is named there with arguments from the file. Only if "
            f"that is your model's own code, load with trust={shown} (TorchModel.load(path, "
            "trust=...)), or inside `with sparkdl.trusted_modules(...):`"
        )
    try:
        return {path: find(path, trust, harmless) for path in paths}
    except NotFoundError as error:
        raise ConfigError(
            f"{name} was saved as {_shortened.repr(spec)}, which cannot be imported here: "
            f"{error}. Install its package, put its folder on sys.path, or add it with "
            "spark.submit.pyFiles"
        ) from error


def _load_pickle(file: Any, directory: Path, name: str, trust: Trust) -> Any:
    if not trust.everything:
        raise ConfigError(
            f"{name} was saved as a pickle, because it is an instance, has arguments that JSON "
            "cannot hold, or was defined in a notebook or script, not in a module that can be "
            "imported. A pickle runs any code its author chose. If you trust the file, load with "
            "trust=True (TorchModel.load(path, trust=True)) or inside `with "
            f"sparkdl.trusted_pickles():`; to avoid this, give {name} as a class or function of an "
            "importable module"
        )
    if file != _pickle_of(name):
        raise ConfigError(
            f"{name} was saved as the pickle {_shortened.repr(file)}; it can only be in "
            f"{_pickle_of(name)}"
        )
    path = directory / _pickle_of(name)
    if not path.is_file():
        raise ConfigError(f"{name} was saved as a pickle, but {path} is missing")
    real = path.resolve()
    if real.parent != directory.resolve():
        raise ConfigError(
            f"{path} is a link to {real}, outside what you trust. Copy the file itself"
        )
    try:
        with real.open("rb") as opened:
            return pickle.load(opened)
    except Exception as error:  # what a pickle runs may raise anything
        raise ConfigError(f"the pickle {path} cannot be loaded: {message_of(error)}") from error


def _pickle_of(name: str) -> str:
    return f"{name}.pkl"


class _Indescribable(Exception):
    """The object, or part of it, cannot be described."""


def _describe(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise _Indescribable(value)
    describe = functools.partial(_describe, depth=depth + 1)
    kind = type(value)
    plain = isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)
    if value is None or plain:
        return value
    if kind in (list, tuple, torch.Size):
        return {"list" if kind is list else "tuple": [describe(item) for item in value]}
    if kind is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item) for key, item in value.items()}}
    if isinstance(value, functools.partial):
        kwargs = {key: describe(item) for key, item in value.keywords.items()}
        func, *args = map(describe, [value.func, *value.args])
        return {"partial": func, "args": args, "kwargs": kwargs}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        _require_made_of(value, fields)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict()
        _require_made_of(value, fields)
    elif isinstance(value, torch.nn.modules.loss._Loss):
        fields = _loss_arguments(value)
    else:
        return {"import": _import_path(value)}
    kwargs = {key: describe(item) for key, item in fields.items()}
    return {"new": {"import": _import_path(kind)}, "kwargs": kwargs}


def _require_made_of(value: Any, fields: dict[str, Any]) -> None:
    """Check that its class makes the same object of these: it may also change or add some."""
    try:
        made = type(value)(**fields)
    except Exception as error:  # the user's constructor may raise anything
        raise _Indescribable(value) from error
    if identity.describe(made)["parts"] != identity.describe(value)["parts"]:
        raise _Indescribable(value)


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
    module, name = identity.own_name(value)
    if not module or not name or "<" in name:
        raise _Indescribable(value)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _Indescribable(value) from error
    if found is not value:
        raise _Indescribable(value)
    return f"{module}:{name}"


def _walk(spec: Any, name: str, find: Callable[[str], Any], build: bool, depth: int = 0) -> Any:
    """Build an object from its spec, or only look at every part of it.

    Args:
        spec: the spec, from a file.
        name: the object's name, for messages.
        find: returns what an import path stands for.
        build: whether to call what was found.
        depth: how deep this part of the spec is.

    Raises:
        ConfigError: some part of it is no spec, or is nested too deeply.
    """
    if depth > DEEPEST:
        raise ConfigError(f"the object spec of {name} is nested more than {DEEPEST} deep")
    again = functools.partial(_walk, name=name, find=find, build=build, depth=depth + 1)
    match spec:
        case None | bool() | int() | float() | str():
            return spec
        case {"import": str(path), **rest} if not rest:
            return find(path)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(again, items))
        case {"list": list(items), **rest} if not rest:
            return list(map(again, items))
        case {"dict": dict(items), **rest} if not rest:
            return {key: again(item) for key, item in items.items()}
        case {"new": {"import": str(path), **more}, "kwargs": dict(kwargs), **rest} if not (
            more or rest
        ):
            kind, arguments = find(path), {key: again(item) for key, item in kwargs.items()}
            if build and not isinstance(kind, type):
                raise TypeError(f"{kind!r} is not a class")
            return kind(**arguments) if build else None
        case {"partial": called, "args": list(args), "kwargs": dict(kwargs), **rest} if not rest:
            arguments = {key: again(item) for key, item in kwargs.items()}
            func, *positional = map(again, [called, *args])
            return functools.partial(func, *positional, **arguments) if build else None
    raise ConfigError(f"the object spec of {name} is damaged: {_shortened.repr(spec)}")
