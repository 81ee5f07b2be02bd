"""Text as it may be shown to others: without the credentials that URIs and options hold."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SURELY_SECRET = (
    r"secret|passw|pwd|passphrase|credential|signature|authorization|[._-]token|"
    r"(?:access|account|api|private|shared|encryption|sas)[._-]?key"
)
_SECRET = rf"{_SURELY_SECRET}|token|\bsig\b|\bkey\b|\bheaders\b"
_SECRET_KEY = re.compile(_SECRET, re.IGNORECASE)
# The user's part of a URI. A password may hold what it should not, a slash or an @, but then there
# is a colon before it that is not that of a port.
# Azure's are followed by their container, unless there is a colon.
_USER = re.compile(
    r"""(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)
    (?:[^\s/?\#'"<>@:]*:(?!\d+(?:[/?\#]|$))[^\s'"<>]*@ | (?<!\babfs://)(?<!\babfss://)
    (?<!\bwasb://)(?<!\bwasbs://)[^\s/?\#'"<>]*@)
    | (?P<oracle>\boracle:\w+:)[^\s'"@]+@""",
    re.VERBOSE,
)
_OPTION = re.compile(
    rf"""(?P<name>[?&;,]\s*[\w.%-]*(?:{_SECRET})[\w.%-]*=)[^\s&;,'"<>\#)\]}}]+""",
    re.IGNORECASE | re.VERBOSE,
)
# Of JSON and of Python, where a column of rows may be called "key" or "token".
_QUOTED = re.compile(
    rf"""(?P<name>(?P<quote>["'])[^"'\\]{{0,64}}(?:{_SURELY_SECRET})[^"'\\]{{0,64}}(?P=quote)\s*:\s*)
    (?P<mark>["'])(?:(?!(?P=mark))[^\\]|\\.)*(?P=mark)""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(
    r"""(?P<name>\bauthorization:\s*)(?:(?:basic|bearer|token)\s+)?[^\s"',;]+""", re.IGNORECASE
)
_SHORTEST = 4
"""Shorter values are found in texts that have nothing to do with them."""


def without_credentials(text: str) -> str:
    """A text whose URIs have lost their users, passwords, keys, signatures and tokens.

    Args:
        text: any, for example ``s3://KEY:SECRET@bucket/path``, which becomes
            ``s3://***@bucket/path``.
    """
    told = _USER.sub(lambda found: f"{found['scheme'] or found['oracle']}{HIDDEN}@", text)
    told = _QUOTED.sub(rf"\g<name>\g<mark>{HIDDEN}\g<mark>", told)
    for each in (_OPTION, _HEADER):
        told = each.sub(rf"\g<name>{HIDDEN}", told)
    return told


def shown(place: str | os.PathLike[str] | Mapping[str, Any]) -> str:
    """Return a place as messages may name it.

    Args:
        place: a path, a URI, or what tensorstore takes for one.
    """
    if isinstance(place, Mapping):
        return without_credentials(json.dumps(_without_values(place), default=str))
    return without_credentials(os.fspath(place))


def without_secrets(text: str, configuration: Any) -> str:
    """A text without credentials, and without the values of a configuration's secret options.

    Args:
        text: an error's message, for example.
        configuration: mappings and lists; the values of keys that are called after a password, key,
            token, secret or credential are not shown.
    """
    for value in sorted({*_secrets(configuration)}, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return without_credentials(text)


def _without_values(value: Any, *, is_secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_values(each, is_secret=is_secret or bool(_SECRET_KEY.search(str(name))))
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_values(each, is_secret=is_secret) for each in value]
    return HIDDEN if is_secret and value is not None else value


def _secrets(configuration: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(configuration, Mapping):
        for name, value in configuration.items():
            yield from _secrets(value, is_secret=bool(_SECRET_KEY.search(str(name))))
    elif isinstance(configuration, Iterable) and not isinstance(configuration, (str, bytes)):
        for value in configuration:
            yield from _secrets(value, is_secret=is_secret)
    elif is_secret and len(str(configuration)) >= _SHORTEST and configuration is not None:
        yield str(configuration)
