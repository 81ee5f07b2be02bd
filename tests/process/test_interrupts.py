"""An alarm interrupts the main thread wherever it is, and says where that was."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from sparkdl.errors import DeadlineError
from sparkdl.process.interrupts import raise_after


@pytest.fixture(autouse=True)
def _same_alarm() -> Iterator[None]:
    """That of the test's own timeout goes on afterwards."""
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_an_alarm_interrupts_what_hangs_and_says_where() -> None:
    with pytest.raises(DeadlineError, match="test_an_alarm_interrupts_what_hangs_and_says_where"):
        hang(raise_after(0.01, DeadlineError))


def hang(_: object) -> None:
    time.sleep(600)


def test_an_alarm_that_is_called_off_is_not_raised() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    raise_after(600.0, DeadlineError)()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == handler
