"""A command line or configuration that is refused, and the part of it that still counts."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, Namespace

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
    """A parser whose refusals keep their message, for the result file."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report what is wrong, and how to use the job.

        Raises:
            Refused: always.
        """
        try:
            super().error(message, ex)
        except SystemExit as end:
            raise Refused(message) from end
        raise Refused(message)  # in case jsonargparse's own, which ends the process, ever returns


def require_mappings(parser: ArgumentParser, arguments: list[str] | None) -> None:
    """Refuse configuration files that hold no keys, in words that a person understands.

    Missing files and invalid YAML are left to the parser, which says where.
    """
    for name, value in _given(arguments, "config"):
        try:
            found = _read(value)
        except UnicodeDecodeError as error:
            parser.error(f"{value} is not valid UTF-8: {error}")
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if not isinstance(found, dict):
            what = "is empty" if found is None else f"is a {type(found).__name__}"
            parser.error(
                f"{value} {what}: --{name} takes a file of keys, such as conf/flights.yaml"
            )


def fill_sections(parser: ArgumentParser, config: Namespace) -> None:
    """Use a section's defaults if all its keys are missing or commented out in the file."""
    for name, default in vars(parser.get_defaults()).items():
        found = config.get(name)
        if name not in PLAIN_SECTIONS or isinstance(found, Namespace):
            continue
        if isinstance(default, Namespace) and found is not None:
            parser.error(f"{name} must be a section of keys with values, got {found!r:.200}")
        config[name] = default


def require_one_path(parser: ArgumentParser, config: Namespace, names: Collection[str]) -> None:
    """Refuse output paths that could be written, but would be read as another or not at all."""
    for name in sorted(names):
        if found := _GLOB.search(config[name]):
            parser.error(
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
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found = _read(value)
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


def _read(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
