"""A command line or configuration that is refused, and the part of it that still counts."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from sparkdl.jobs.configuration.wording import in_words
from sparkdl.jobs.configuration.yaml_text import YamlError, is_decimal, parse, read
from sparkdl.redaction import without_credentials, without_secrets

PLAIN_SECTIONS = ("session", "rows", "write")
"""Sections that are keys with defaults."""
_GLOB = re.compile(r"[{[*?\\]")
"""Characters that Hadoop takes for a path pattern; pyspark.ml's loaders cannot escape them."""


class Refused(SystemExit):
    """The parser has reported what is wrong, and ends the process.

    Args:
        message: what it reported.
    """

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
    for name, value in _given(arguments, "config"):
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
                f"{shown} {what}: --{name} takes a file of keys, such as conf/flights.yaml"
            )


def require_decimals(parser: JobParser, arguments: list[str] | None) -> None:
    """Refuse numbers of the command line that would be read in another base, as in a file."""
    hints = {action.dest: str(getattr(action, "_typehint", "str")) for action in parser._actions}
    numbers = [name for name, hint in hints.items() if re.search("int|float", hint)]
    for name, value in _given(arguments, *(name for name in numbers if "str" not in hints[name])):
        if not is_decimal(value):
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
    named = None
    for name, value in _given(arguments, "config", "result_file"):
        if name == "result_file":
            named = value
            continue
        with contextlib.suppress(OSError, ValueError, YamlError):
            found = read(value)
            if isinstance(found, dict) and isinstance(found.get("result_file"), str):
                named = found["result_file"]
    return named or None


def _given(arguments: list[str] | None, *names: str) -> Iterator[tuple[str, str]]:
    """Options and their values in the order of the command line, where the last one counts."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if option == f"--{name}" and name in names:
            if equals:
                yield name, value
            elif position + 1 < len(words) and not words[position + 1].startswith("--"):
                yield name, words[position + 1]
