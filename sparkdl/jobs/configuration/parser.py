"""The parser of jobs: what it refuses, in one sentence without values, and what still counts then.

jsonargparse's own messages quote what they refuse, which may hold passwords. So nothing of them is
passed on but the names of keys, classes, arguments and types.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from sparkdl.jobs.configuration.yaml_text import YamlError, is_decimal, parse, read
from sparkdl.redaction import without_credentials, without_secrets

PLAIN_SECTIONS = ("session", "rows", "write")
"""Sections that are keys with defaults."""
_GLOB = re.compile(r"[{[*?\\]")
"""Characters that Hadoop takes for a path pattern; pyspark.ml's loaders cannot escape them."""


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


class Refused(SystemExit):
    """The parser has reported what is wrong, and ends the process."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message

    def __str__(self) -> str:
        return self.message


class JobParser(ArgumentParser):  # type: ignore[misc]
    """A parser whose refusals quote no value, and keep their message for the result file."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report what jsonargparse finds wrong, and how to use the job.

        Raises:
            Refused: always.
        """
        if not self.exit_on_error:  # it parses a part, and the whole's parser reports it
            super().error(message, ex)
        self.refuse(in_words(message, [action.dest for action in self._actions]))

    def refuse(self, message: str, configuration: Any = None) -> NoReturn:
        """Report what is wrong in our own words, and how to use the job.

        Args:
            message: what is wrong.
            configuration: what the message may quote, but for its secrets.

        Raises:
            Refused: always.
        """
        message = without_secrets(message, configuration)
        try:
            super().error(message)
        except SystemExit as end:
            raise Refused(message) from end
        raise Refused(message)  # in case jsonargparse's own, which ends the process, ever returns


def require_mappings(parser: JobParser, arguments: list[str] | None) -> None:
    """Refuse configuration files that cannot be read, or hold no keys."""
    for value in _given(arguments, "config")["config"]:
        shown = without_credentials(value)
        try:
            found = read(value)
        except UnicodeDecodeError:
            parser.refuse(f"{shown} is not valid UTF-8")
        except YamlError as error:
            parser.refuse(f"{shown} {error}")
        except (OSError, ValueError) as error:
            with contextlib.suppress(YamlError):
                if isinstance(parse(value), dict):  # the keys themselves
                    continue
            why = getattr(error, "strerror", None) or "it cannot be a path"
            parser.refuse(f"{shown} cannot be read: {why}")
        if not isinstance(found, dict):
            what = "is empty" if found is None else f"is a {type(found).__name__}"
            parser.refuse(
                f"{shown} {what}: --config takes a file of keys, such as conf/flights.yaml"
            )


def require_decimals(parser: JobParser, arguments: list[str] | None) -> None:
    """Refuse numbers of the command line that would be read in another base, as in a file."""
    hints = {action.dest: str(getattr(action, "_typehint", "str")) for action in parser._actions}
    numbers = [n for n, hint in hints.items() if re.search("int|float", hint) and "str" not in hint]
    for name, values in _given(arguments, *numbers).items():
        if not all(map(is_decimal, values)):
            parser.refuse(f"--{name} must be a number in base 10, without leading zeros or colons")


def fill_sections(parser: JobParser, config: Namespace) -> None:
    """Use a section's defaults if all its keys are missing or commented out in the file."""
    for name, default in vars(parser.get_defaults()).items():
        found = config.get(name)
        if name not in PLAIN_SECTIONS or isinstance(found, Namespace):
            continue
        if isinstance(default, Namespace) and found is not None:
            kind = type(found).__name__
            parser.refuse(f"{name} must be a section of keys with values, got {kind}")
        config[name] = default


def require_one_path(parser: JobParser, config: Namespace, names: Collection[str]) -> None:
    """Refuse output paths that could be written, but would be read as another or not at all."""
    for name in sorted(names):
        if found := _GLOB.search(config[name]):
            parser.refuse(
                f"--{name} '{config[name]}' contains '{found[0]}', so Spark would read it as a "
                "glob pattern. Use a path without it; or is this a template that was never "
                "filled in?"
            )


def result_file_of(arguments: list[str] | None) -> str | None:
    """The result file that a refused command line names, itself or in a readable file."""
    given = _given(arguments, "config", "result_file")
    named = given["result_file"]
    for path in given["config"] if not named else ():
        with contextlib.suppress(OSError, ValueError, YamlError):
            found = read(path)
            if isinstance(found, dict) and isinstance(found.get("result_file"), str):
                named.append(found["result_file"])
    return named[-1] or None if named else None


def _given(arguments: list[str] | None, *names: str) -> dict[str, list[str]]:
    """The values of some options, whatever else is wrong with the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", action="append", nargs="?")
    given = vars(parser.parse_known_args(arguments)[0])
    return {name: [each for each in given[name] or () if each is not None] for name in names}


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
