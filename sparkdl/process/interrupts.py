"""Signals that interrupt a process of an executor: SIGINT, from whoever ends it, and its own alarm.

No code of the user's has failed then.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Interrupted(KeyboardInterrupt):
    """SIGINT has arrived; any other KeyboardInterrupt was raised by the user's own code."""


@contextmanager
def interrupted_by_signals_alone() -> Iterator[None]:
    """Raise ``Interrupted`` on SIGINT, and let the signal end the process if nobody catches it.

    So whoever waits for the process sees that it was interrupted. A handler of the user's stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except Interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_after(seconds: float, error: Callable[[str], Exception]) -> Callable[[], None]:
    """Raise an error in this thread later, wherever it is then, if it is the main thread.

    Native code that never returns is not interrupted.

    Args:
        seconds: until then.
        error: makes the error of where the thread was, as in a traceback.

    Returns:
        Calls it off.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def on_alarm(number: int, frame: FrameType | None) -> NoReturn:
        raise error("".join(traceback.format_stack(frame)))

    def call_off() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return call_off


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted
