"""Values of a configuration: checked against declared types, and the objects that they name.

Objects are named by ``class_path`` and ``init_args``. A refusal names keys, types, classes and
their arguments; it quotes no value, which may be a password.

YAML as people read it: no key twice, no number in another base than it looks.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from sparkdl.errors import ConfigError

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)


class YamlError(ValueError):
    """What is wrong with a text, and in which line; no value is quoted."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's, without dates, and with the numbers of YAML 1.2: ``1e-3``, not ``010``."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [each for each in known if not each[0].endswith((":int", ":float", ":timestamp"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in keys:
                raise YamlError(f"has a duplicate key '{key.value}'{_where(key.start_mark)}")
            keys.add(name)
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str) -> Any:
    """What a text holds.

    Raises:
        YamlError: it is not what a person would take it for.
    """
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        # Not what it found there: that may be a password, taken for an alias or a tag.
        problem = re.sub(r"\b(alias|anchor|handle|tag) '.*'", r"\1", str(error.problem))
        raise YamlError(f"is not valid YAML: {problem}{_where(error.problem_mark)}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        raise YamlError(
            "is not valid YAML: a value has no meaning, or is nested too deeply"
        ) from None


def _where(mark: Any) -> str:
    return "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"


SPEC = ("class_path", "init_args", "dict_kwargs")
"""The keys of what describes an object."""
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class Text(str):
    """A value of the command line: YAML, or any text for a key that takes one."""

    __slots__ = ()


class Named(partial[Any]):
    """An object to build: a class or function that the configuration names, and its arguments."""


def checked(place: str, value: Any, kind: Any) -> Any:
    """A value as its declared type wants it, with ``Named`` for each object that it describes.

    Args:
        place: its place in the configuration.
        value: what YAML or the command line says.
        kind: the annotation; what is not a type accepts anything.

    Raises:
        ConfigError: it is of another type, or describes what there is not.
    """
    kinds = _alternatives(kind)
    if isinstance(value, Text):
        return _read(place, value, kind, takes_text=str in kinds)
    spec = value if isinstance(value, dict) and "class_path" in value else None
    origins = [get_origin(each) or each for each in kinds]
    is_name = Callable in origins or (str not in kinds and any(map(_is_named, origins)))
    if is_name and isinstance(value, str) and _IMPORT_PATH.fullmatch(value):
        spec = {"class_path": value}
    if spec is not None:
        try:
            return _named(place, spec, kind)
        except ConfigError:
            if spec is value or str not in kinds:
                raise
    told = []
    for each in sorted(kinds, key=lambda each: each is not type(value)):
        try:
            return _fitted(place, value, each)
        except ConfigError as error:
            told.append(str(error))
    words = f"{place} must be {shown(kind)}, got {_type_of(value)}"
    if is_name and isinstance(value, str):
        words += "; name it by its import path, such as package.name"
    elif isinstance(value, str) and value[-1:].isdigit() and {int, float} & {*kinds}:
        words += "; write numbers without leading zeros and colons"
    raise ConfigError(next(filter(None, told), words))


def arguments(place: str, called: Any, said: Any, path: str | None = None) -> dict[str, Any]:
    """The arguments of a class or function, checked against its signature.

    Args:
        place: their place in the configuration.
        called: the class or function.
        said: what the configuration says; None for none of them.
        path: its import path; None for a section of the configuration.

    Raises:
        ConfigError: one is not taken, or is of another type.
    """
    parameters = parameters_of(called)
    found = {}
    for name, value in section(place, said).items():
        parameter = parameters.get(name) or parameters.get("**")
        if parameter is None:
            what = f"{place}: '{path}' takes no argument '{name}'"
            if path is None:
                what = f"there is no key '{f'{place}.{name}'.lstrip('.')}'"
            raise ConfigError(what + nearest(str(name), parameters))
        kind, is_optional = parameter.annotation, parameter.default is None
        kind = Union[kind, None] if is_optional else kind  # noqa: UP007
        value = checked(f"{place}.{name}".lstrip("."), value, kind)
        # pyspark.ml's stages do not take None, so what was not given is left out.
        if value is not None or not is_optional:
            found[name] = value
    return found


def parameters_of(called: Any) -> dict[str, inspect.Parameter]:
    """What a class or function takes, by name, with its types; ``**`` for what its kwargs take."""
    try:
        found = inspect.signature(called).parameters
    except (TypeError, ValueError):  # written in C
        found = inspect.signature(lambda **_: None).parameters
    hints: dict[str, Any] = {}
    with suppress(Exception):  # a type that is imported for a type checker only
        is_class = isinstance(called, type) and not is_dataclass(called)
        hints = get_type_hints(called.__init__ if is_class else called)  # type: ignore[misc]
    takes = {}
    for name, each in found.items():
        kind = hints.get(name, Any if isinstance(each.annotation, str) else each.annotation)
        if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            takes["**" if each.kind is each.VAR_KEYWORD else name] = each.replace(annotation=kind)
    return takes


def section(place: str, said: Any) -> dict[str, Any]:
    """What a part of the configuration says by key; nothing if all its keys are commented out.

    Raises:
        ConfigError: it is no mapping.
    """
    if isinstance(said, Text):
        with suppress(YamlError):
            said = parse(said)
    if not isinstance(said, (dict, NoneType)):
        raise ConfigError(f"{place} must be a section of keys with values, got {_type_of(said)}")
    return said or {}


def built(value: Any) -> Any:
    """The object that a checked value describes; other values unchanged."""
    if isinstance(value, Named):
        return builder(value)()
    if isinstance(value, dict):
        return {name: built(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(built, value))
    return value


def builder(value: Any) -> Any:
    """What makes the object: the class or function, with its arguments; other values unchanged."""
    if not isinstance(value, Named):
        return built(value)
    return partial(value.func, **built(value.keywords)) if value.keywords else value.func


def nearest(name: str, names: Iterable[str]) -> str:
    """A question whether the nearest of some names is meant; empty if none is near."""
    ignoring_case = {each.lower(): each for each in names}
    found = get_close_matches(name.lower(), ignoring_case, n=1)
    return f"; did you mean '{ignoring_case[found[0]]}'?" if found else ""


def shown(kind: Any) -> str:
    """A type, as people write it."""
    if len(kinds := _alternatives(kind)) > 1:
        return " or ".join(map(shown, kinds))
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return "null" if kind is NoneType else re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", name)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "str"
    return "null; leave a key out for its default" if value is None else type(value).__name__


def _read(place: str, text: str, kind: Any, *, takes_text: bool) -> Any:
    """A value of the command line: what YAML makes of it, or else the text if that will do."""
    value: Any = str(text)
    with suppress(YamlError):
        value = parse(text)
    if takes_text and (isinstance(value, str) or (value is None and text not in ("null", "~"))):
        value = str(text)
    try:
        return checked(place, value, kind)
    except ConfigError:
        if not takes_text or (isinstance(value, dict) and "class_path" in value):
            raise
        return str(text)


def _fitted(place: str, value: Any, kind: Any) -> Any:
    """A value as one type wants it; the error says nothing if it is of another one."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal and value in inner:
        return value
    if origin in (bool, int, float) and isinstance(value, str):  # a number in quotes
        with suppress(YamlError):
            value = parse(value)
    if origin is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{place} is larger than the largest float") from None
    if origin is Path and isinstance(value, str):
        return Path(value)
    untyped = _is_untyped(origin)
    if origin is Literal:
        pass
    elif isinstance(value, dict) and is_dataclass(origin) and isinstance(origin, type):
        return Named(origin, **arguments(place, origin, value))
    elif isinstance(value, dict) and (untyped or issubclass(origin, Mapping)):
        names, kinds = inner or (Any, Any)
        return {
            checked(f"a key of {place}", name, names): checked(f"{place}.{name}", each, kinds)
            for name, each in value.items()
        }
    elif isinstance(value, list) and (untyped or issubclass(list, origin) or origin is tuple):
        is_fixed = origin is tuple and bool(inner) and inner[-1] is not Ellipsis
        kinds = inner if is_fixed else (*inner[:1], Any)[:1] * len(value)
        if len(kinds) == len(value):
            found = [checked(f"{place}[{n}]", each, kinds[n]) for n, each in enumerate(value)]
            return tuple(found) if origin is tuple else found
    elif untyped or type(value) is origin:
        return value
    raise ConfigError


def _is_untyped(origin: Any) -> bool:
    """Whether an annotation says nothing that could be checked."""
    is_type = isinstance(origin, type) and not getattr(origin, "_is_protocol", False)
    return origin in (Any, object, inspect.Parameter.empty) or not (is_type or origin is Literal)


def _is_named(origin: Any) -> bool:
    """Whether what is of a type is built, or is itself a class or function."""
    values = ("builtins", "collections.abc", "pathlib", "os", "typing")
    return origin in (Callable, type) or not (_is_untyped(origin) or origin.__module__ in values)


def _named(place: str, spec: Mapping[str, Any], kind: Any) -> Any:
    """The class or function that a specification names, with its arguments."""
    for name in spec:
        if name not in SPEC:
            raise ConfigError(f"there is no key '{place}.{name}'{nearest(str(name), SPEC)}")
    path = checked(f"{place}.class_path", spec["class_path"], str)
    called = _resolved(place, path)
    is_class = isinstance(called, type)
    origins = [get_origin(each) or each for each in _alternatives(kind)]
    if not callable(called) or not any(
        each is Callable
        or _is_untyped(each)
        or (each is type and is_class)
        or (_is_named(each) and each is not type and (not is_class or issubclass(called, each)))
        for each in origins
    ):
        raise ConfigError(f"{place}: '{path}' is no {shown(kind)}")
    if type in origins or (Callable in origins and not is_class and len(spec) == 1):
        return called
    place = f"{place}.init_args"
    said = {**section(place, spec.get("init_args")), **section(place, spec.get("dict_kwargs"))}
    return Named(called, **arguments(place, called, said, path))


def _resolved(place: str, path: str) -> Any:
    """What an import path leads to."""
    found: Any = None
    at = ""
    for name in path.split("."):
        below = f"{at}.{name}".lstrip(".")
        try:
            has_it = bool(at) and hasattr(found, name)
            found = getattr(found, name) if has_it else importlib.import_module(below)
        except ImportError as error:
            what = f"'{path}' cannot be imported: {error}"
            if at and below.startswith(str(error.name)):
                near = nearest(name, [*dir(found), *getattr(found, "__dict__", ())])
                what = f"'{at}' has no '{name}'{near}"
            raise ConfigError(f"{place}: {what}") from error
        at = below
    return found
