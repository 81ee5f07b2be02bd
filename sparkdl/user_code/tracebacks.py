"""What people are told of an error in their code: that code first, what called it in a note."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_OURS = f"{Path(__file__).parents[1]}/"
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen ")


def traceback_of(error: BaseException) -> str:
    """An error's traceback, without the frames that come before the user's first.

    Where there is none of the user's, or it is in an installed package, only our own frames go.
    """
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
