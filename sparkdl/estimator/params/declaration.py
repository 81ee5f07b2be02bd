"""One declaration a Param: pyspark.ml's Param, its accessors, its argument, its documentation.

The types that editors and mypy see are in the ``.pyi`` beside each table of declarations; the test
of the stubs says how to write them anew. Reports and experiment trackers have a fit's Params as
text.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args

from pyspark.ml.param import Param, Params
from torch import nn
from typing_extensions import Self

from sparkdl.arguments import require_whole
from sparkdl.errors import ConfigError
from sparkdl.redaction import without_credentials
from sparkdl.spark.rows import converters

GROUPS = (
    "Training",
    "Workers",
    "Columns",
    "Rows",
    "Validation",
    "Outputs",
    "Monitoring",
    "Recovery",
    "Network",
    "Prediction",
)
"""The groups of arguments, in their order."""


class Default(Enum):
    """What an argument is if it is not given and its Param has no default value."""

    REQUIRED = "required"
    UNSET = "unset"
    """None, with which the Param stays as it is: some of pyspark.ml's own cannot be None."""


@dataclass(frozen=True)
class Declaration:
    """A Param, declared in the body of a ``DeclaredParams`` under its name and what it holds."""

    convert: Callable[[Any], Any] | None
    """Checks what is set, or makes what does of the Param's name if ``named``; not asked about None
    if that is the default. None for a Param that pyspark.ml declares itself."""
    default: Any
    """Of the argument and the Param, or one of ``Default``."""
    doc: str
    """One line, without a capital and a full stop, that ``explainParams`` shows too."""
    more: str = ""
    """Further sentences for the documentation."""
    type: Any = None
    """What the constructor and the setter take, if another type than it holds."""
    group: str = ""
    named: bool = False

    @property
    def text(self) -> str:
        """All that the documentation says of it."""
        return f"{self.doc.removesuffix('.')}.{' ' if self.more else ''}{self.more}"

    def argument(self, name: str) -> inspect.Parameter:
        """The constructor's argument."""
        default, annotation = self.default, self.type
        if isinstance(default, Default):
            default = inspect.Parameter.empty if default is Default.REQUIRED else None
        if self.default is Default.UNSET:
            annotation = annotation | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def flag(default: bool, doc: str, more: str = "") -> Declaration:
    """A Param that is True or False."""
    return Declaration(converters.switch, default, doc, more, bool, named=True)


def number(least: int, default: int | None, doc: str, more: str = "") -> Declaration:
    """A Param that is a whole number; or None, if that is its default."""
    kind = int | None if default is None else int

    def convert(name: str) -> Any:
        return partial(require_whole, name, least=least)

    return Declaration(convert, default, doc, more, kind, named=True)


def choice(words: tuple[str, ...], doc: str, more: str = "") -> Declaration:
    """A Param that is one of some words, by default the first."""
    convert = partial(converters.one_of, allowed=words)
    return Declaration(convert, words[0], doc, more, str, named=True)


_REPLACED = {
    "averagerHost": "the Spark setting spark.sparkdl.driver.port, which fixes the driver's port",
    "featuresAsDict": "featuresAs='dict'",
    "featuresAsKwargs": "featuresAs='kwargs'",
    "scoreCol": "lossCol",
}
"""What came in the place of Params that are gone."""


class DeclaredParams(Params):
    """A class that has a Param, a getter and a setter for each declaration in its body."""

    declarations: ClassVar[dict[str, Declaration]] = {}
    """All that the class has, by name and in the order of the documentation."""

    def __init_subclass__(cls, *, group: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found: dict[str, Declaration] = {}
        for base in cls.__bases__:
            for name, each in getattr(base, "declarations", {}).items():
                found.setdefault(name, each)
        for name, each in list(vars(cls).items()):
            if isinstance(each, Declaration):
                kind = each.type
                if kind is None:
                    (kind,) = get_args(inspect.get_annotations(cls, eval_str=True)[name])
                found[name] = replace(each, group=each.group or group, type=kind)
                _make_param(cls, name, each)
        order = sorted(found.items(), key=lambda item: GROUPS.index(item[1].group))
        cls.declarations = dict(order)

    def explainParam(self, param: str | Param[Any]) -> str:
        """A Param's name, doc, default and value, without the credentials of URIs."""
        return without_credentials(super().explainParam(param))

    def setParams(self, **values: Any) -> Self:
        """Set several Params by their names, as pyspark.ml's own estimators do.

        Raises:
            ConfigError: there is no such Param.
        """
        self._require_declared(values)
        unset = {n for n, each in self.declarations.items() if each.default is Default.UNSET}
        return self._set(**{n: v for n, v in values.items() if v is not None or n not in unset})

    def _require_declared(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.declarations:
                close = difflib.get_close_matches(name, self.declarations, n=1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                if name in _REPLACED:
                    hint = f" In its place there is {_REPLACED[name]}."
                raise ConfigError(
                    f"{type(self).__name__} has no parameter '{name}'.{hint} It has: "
                    f"{', '.join(self.declarations)}"
                )

    def _set(self, **values: Any) -> Self:
        # pyspark.ml lets None pass unchecked.
        for name, value in values.items():
            if value is None:
                try:
                    self.getParam(name).typeConverter(value)
                except TypeError as error:  # worded as pyspark.ml does for any other value
                    told = f'Invalid param value given for param "{name}". {error}'
                    raise TypeError(told) from error
        return super()._set(**values)

    def _set_declared_defaults(self) -> None:
        defaults = {name: each.default for name, each in self.declarations.items()}
        self._setDefault(**{n: v for n, v in defaults.items() if not isinstance(v, Default)})


def _make_param(cls: type, name: str, declaration: Declaration) -> None:
    if declaration.convert is None:
        param = getattr(super(cls, cls), name)
    else:
        convert: Any = declaration.convert
        if declaration.named:
            convert = convert(name)
        if declaration.default is None:
            convert = converters.optional(convert)
        param = Param(Params._dummy(), name, declaration.doc, typeConverter=convert)

    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    def set_value(self: Any, value: Any) -> Any:
        self._set(**{name: value})
        return self

    setattr(cls, name, param)
    accessors = {
        "get": (get, f"Gets the value of {name} or its default value."),
        "set": (set_value, f"Sets the value of {name}."),
    }
    for verb, (method, doc) in accessors.items():
        method.__name__ = f"{verb}{name[0].upper()}{name[1:]}"
        method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
        method.__module__, method.__doc__ = cls.__module__, doc
        if method.__name__ not in vars(cls):
            setattr(cls, method.__name__, method)


T = TypeVar("T", bound=type[DeclaredParams])


def constructor(beside: type[DeclaredParams] | None = None) -> Callable[[T], T]:
    """Give an estimator a constructor, and its docstring the constructor's arguments.

    Arguments that are not given keep their Params' defaults; unknown ones are refused.

    Args:
        beside: a class whose arguments the docstring leaves out.
    """

    def decorated(cls: T) -> T:
        arguments = {name: each.argument(name) for name, each in cls.declarations.items()}
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([own, *arguments.values()], return_annotation=None)
        cls.__init__ = _constructor(cls, arguments)  # type: ignore[method-assign]
        cls.__init__.__signature__ = signature  # type: ignore[attr-defined]
        elsewhere = {} if beside is None else beside.declarations
        listed = {n: each for n, each in cls.declarations.items() if elsewhere.get(n) != each}
        summary, raises, errors = inspect.cleandoc(cls.__doc__ or "").partition("Raises:")
        cls.__doc__ = f"{summary}{documented(listed)}\n{raises}{errors}"
        return cls

    return decorated


def _constructor(
    cls: type[DeclaredParams], arguments: dict[str, inspect.Parameter]
) -> Callable[..., None]:
    needed = [name for name, each in arguments.items() if each.default is each.empty]

    def __init__(self: Any, **given: Any) -> None:
        self._require_declared(given)
        if missing := [f"'{name}'" for name in needed if name not in given]:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        super(cls, self).__init__()
        self._set_declared_defaults()
        self.setParams(**given)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__module__ = cls.__module__
    return __init__


def documented(declarations: Mapping[str, Declaration], *, width: int = 100) -> str:
    """Arguments as a docstring lists them, by group."""
    lines: list[str] = []
    group = ""
    for name, each in declarations.items():
        if each.group != group:
            group = each.group
            lines += [*([""] if lines else []), f"{group}:"]
        lines += textwrap.wrap(
            f"{name}: {each.text}",
            width,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


LONGEST = 500
"""The most characters of one value; MLflow, for one, refuses more than 6000."""


def settings_of(stage: Params) -> dict[str, object]:
    """The values of a stage's Params, defaults included.

    Returns:
        The values by name: numbers, booleans and None as they are, all others as text.
    """
    return {
        param.name: described(stage.getOrDefault(param))
        for param in stage.params
        if stage.isDefined(param)
    }


def described(value: Any) -> object:
    """A value as a person would write it, as far as possible."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _text(value)[:LONGEST]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, functools.partial):
        arguments = [_brief(each) for each in value.args]
        arguments += [f"{name}={_brief(each)}" for name, each in value.keywords.items()]
        return f"{_text(value.func)}({', '.join(arguments)})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, (list, tuple)):
        # Of a million labels, more would be described only to be cut off.
        return f"[{', '.join(_brief(each) for each in value[:LONGEST])}]"
    return _brief(value)


def _brief(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    try:
        text = _Repr().repr(value) if isinstance(value, (dict, set)) else repr(value)
    except Exception:  # a user's object need not be able to describe itself
        text = object.__repr__(value)
    # An address says nothing, and differs in each fit.
    if " object at 0x" in text:
        return type(value).__name__
    return without_credentials(text)[:LONGEST]


class _Repr(reprlib.Repr):
    """Cuts texts only once they have no credentials."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_credentials(x), level)
