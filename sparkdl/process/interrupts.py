"""SIGINT in a worker's process: somebody ends the process, and no code of the user's has failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted
