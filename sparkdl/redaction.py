"""Text as it may be shown to others: without the credentials that URIs and options hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SECRET = (
    r"secret|token|passw|pwd|passphrase|credential|signature|authorization|"
    r"(?:access|account|api|private|shared|encryption|sas)[._-]?key|\bsig\b|\bkey\b"
)
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
_SHORTEST = 4
"""Shorter values are found in texts that have nothing to do with them."""


def without_credentials(text: str) -> str:
    """A text whose URIs have lost their users, passwords, keys, signatures and tokens.

    Args:
        text: any, for example ``s3://KEY:SECRET@bucket/path``, which becomes
            ``s3://***@bucket/path``.
    """
    shown = _USER.sub(lambda found: f"{found['scheme'] or found['oracle']}{HIDDEN}@", text)
    return _OPTION.sub(rf"\g<name>{HIDDEN}", shown)


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


def _secrets(configuration: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(configuration, Mapping):
        for name, value in configuration.items():
            yield from _secrets(value, is_secret=bool(_SECRET_KEY.search(str(name))))
    elif isinstance(configuration, Iterable) and not isinstance(configuration, (str, bytes)):
        for value in configuration:
            yield from _secrets(value, is_secret=is_secret)
    elif is_secret and len(str(configuration)) >= _SHORTEST and configuration is not None:
        yield str(configuration)
