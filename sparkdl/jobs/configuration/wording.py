"""jsonargparse's refusals in one sentence: the key, what is expected and what was given instead.

Its own messages quote what they refuse, which may hold passwords. So nothing is passed on but the
names of keys, classes, arguments and types.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches

_KEY = re.compile(r'^[\s-]*Parser key "([\w.\[\]-]+)"', re.MULTILINE)
_CLASS = re.compile(r"(?:class_path |class_path=|Expected )'([\w.]+)'")
_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_OPTION = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.-]+)'")
_REQUIRED = re.compile(r"the following arguments are required: ([\w., -]+)")
_ARGPARSE = re.compile(r"argument (--[\w.-]+): (expected [a-z ]*argument)s?")
_SUBTYPES = re.compile(r"^\s*Subtypes: \[(.*)\]$", re.MULTILINE)
_EXPECTED = re.compile(
    r"Expected a (<class '[\w.]+'>|typing\.Literal\[[^]]*\]|[\w.]+\[[\w., \[\]]*\])"
)
_GIVEN = re.compile(r"^\s*Given value type: <class '(?:\w+\.)*(\w+)'>$", re.MULTILINE)
_NOT_SUBCLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")


def in_words(message: str, options: Iterable[str]) -> str:
    """One sentence for a message of jsonargparse, without the values in it.

    Args:
        message: the message.
        options: the parser's options, such as ``estimator.epochs``.
    """
    if message.startswith("unrecognized arguments: "):
        return _unrecognized(message, list(options))
    if found := _ARGPARSE.match(message):
        return f"{found[1]}: {found[2]}"
    key = _KEY.search(message)
    place = "the configuration" if key is None else key[1]
    causes = [_wrong_name(message, place, list(options)), _wrong_type(message, place)]
    return next((cause for cause in causes if cause), f"{place} is not what the job takes")


def nearest(name: str, names: Iterable[str]) -> str:
    """A question whether the nearest of some names is meant; empty if none is near."""
    ignoring_case = {each.lower(): each for each in names}
    found = get_close_matches(name.lower(), ignoring_case, n=1)
    return f"; did you mean '{ignoring_case[found[0]]}'?" if found else ""


def accepted(path: str) -> list[str]:
    """Names of the arguments of a class or function, given by its import path."""
    module, _, name = path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


def _unrecognized(message: str, options: list[str]) -> str:
    words = message.removeprefix("unrecognized arguments: ").split()
    names = [word.partition("=")[0] for word in words if re.match(r"--[\w.-]+(=|$)", word)]
    if not names:
        return "the command line has a word that belongs to no option"
    near = nearest(names[0], [f"--{option}" for option in options])
    return f"there is no option '{names[0]}'{near}"


def _wrong_name(message: str, place: str, options: list[str]) -> str | None:
    called = _CLASS.search(message)
    if found := _ATTRIBUTE.search(message):
        below = [name.rpartition(".") for name in sys.modules]
        names = [name for module, _, name in below if module == found[1]]
        names += dir(importlib.import_module(found[1]))
        return f"{place}: '{found[1]}' has no '{found[2]}'{nearest(found[2], names)}"
    if found := _MODULE.search(message):
        depth = found[1].count(".")
        near = nearest(found[1], [name for name in sys.modules if name.count(".") == depth])
        what = "" if called is None else f"'{called[1]}' cannot be imported: "
        return f"{place}: {what}there is no module '{found[1]}'{near}"
    if found := _OPTION.search(message):
        group, name = found[1], found[2].partition(".")[0]
        if called is not None and group is None:
            near = nearest(name, accepted(called[1]))
            return f"{place}: '{called[1]}' takes no argument '{name}'{near}"
        prefix = f"{group}." if group else ""
        beside = [each.removeprefix(prefix) for each in options if each.startswith(prefix)]
        return f"there is no key '{prefix}{name}'{nearest(name, beside)}"
    if found := _REQUIRED.search(message):
        return f"{place}: {found[0]}"
    if "Unable to load config" in message:
        return f"{place} must be a section of keys with values"
    return None


def _wrong_type(message: str, place: str) -> str | None:
    inner = [key[1] for key in _KEY.finditer(message)][1:]
    called = _CLASS.search(message)
    if inner and called is not None:
        place = f"{place}.init_args.{'.'.join(inner)}"
        message = message[message.index(inner[0]) :]
    subtypes, expected = _SUBTYPES.search(message), _EXPECTED.search(message)
    if subtypes and expected and expected.start() < subtypes.start():
        subtypes = None  # of what is around it
    wanted = subtypes or expected
    if wanted is None:
        found = _NOT_SUBCLASS.search(message)
        return f"{place}: '{found[1]}' is no {found[2]}" if found else None
    if not inner and (found := _NOT_SUBCLASS.search(message)):
        return f"{place}: '{found[1]}' is no {found[2]}"
    given = _GIVEN.search(message)
    if subtypes is None or given is None:
        got = _kind(message.partition("Got value: ")[2])
    else:
        got = given[1]
    words = f"{place} must be {_types(wanted[1])}, got {got}"
    if "[str, str]" in wanted[1] and got == "dict":
        words += " in which not all are: put numbers, true and false in quotes"
    return words


def _types(text: str) -> str:
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("NoneType", "null")
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace(", null", " or null")


def _kind(value: str) -> str:
    """What a value is, by how it begins."""
    if value[:1] in ("[", "{"):
        return {"[": "list", "{": "dict"}[value[0]]
    if re.match(r"[-+.\d]", value):
        return "a number"
    return {"None": "null", "True": "true", "False": "false"}.get(value.strip(), "a text")
