"""What people are told of an error in their code, whatever it is and however long its text.

An exception may be of any class, its ``__str__`` may raise, and its text may have megabytes. So no
message of ours formats one by itself.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path

_OURS = f"{Path(__file__).parents[1]}/"
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")

MESSAGE_CHARACTERS = 4_000
"""The longest text of an error within a sentence of ours."""
TRACEBACK_CHARACTERS = 20_000
"""The longest traceback."""


def shortened(text: str, characters: int) -> str:
    """A text's beginning and end, if it is longer than ``characters``.

    What UTF-8 cannot encode, such as half a surrogate pair, is escaped.
    """
    left_out = len(text) - characters
    if left_out > 0:
        head = 2 * characters // 3
        text = f"{text[:head]} [{left_out} characters left out] {text[head + left_out :]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def message_of(error: BaseException) -> str:
    """An error's type and text, as Python's own traceback ends, to be put into a sentence."""
    try:
        # The lines of its causes would be read from their files only to be dropped.
        told = traceback.TracebackException(
            type(error), error, None, limit=0, lookup_lines=False, compact=True
        )
        lines = "".join(told.format_exception_only()).strip()
    except Exception:  # what it says of itself, as in __notes__, may raise anything
        lines = f"{type(error).__qualname__}: {text_of(error)}"
    return shortened(lines, MESSAGE_CHARACTERS)


def add_note(error: BaseException, note: str) -> None:
    """Add to what is told of an error: as a note, or in Python 3.10, which has none, to its text.

    Args:
        error: one that is about to be raised again.
        note: one or more lines.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{text_of(error)}\n{note}", *error.args[1:])


def text_of(error: BaseException, characters: int = MESSAGE_CHARACTERS) -> str:
    """An error's text without its type, as ``str`` gives it if it can."""
    try:
        text = str(error)
    except BaseException:  # as Python's traceback does: the error itself matters more
        text = "<exception str() failed>"
    return shortened(text, characters)


def traceback_of(error: BaseException) -> str:
    """An error's traceback, without the frames that come before the user's first.

    Where there is none of the user's, or it is in an installed package, only our own frames go.
    """
    try:
        text = _without_callers(error)
    except Exception:  # as above
        text = f"{''.join(traceback.format_tb(error.__traceback__))}{message_of(error)}"
    return shortened(text, TRACEBACK_CHARACTERS)


def _without_callers(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(error)
    stack = list(told.stack)
    users = (number for number, frame in enumerate(stack) if _is_users(frame.filename))
    others = (number for number, frame in enumerate(stack) if not _is_ours(frame.filename))
    first = next(users, next(others, 0))
    told.stack[:] = stack[first:]
    text = "".join(told.format()).rstrip()
    if not first:
        return text
    caller = Path(stack[0].filename)
    return (
        f"{text}\n(Before this come {first} calls that are not your code, the first in "
        f"{caller.parent.name}/{caller.name}, line {stack[0].lineno})"
    )


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen "))


def _is_users(filename: str) -> bool:
    return not (_is_ours(filename) or filename.startswith(_STANDARD) or _INSTALLED.search(filename))
