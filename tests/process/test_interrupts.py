"""An alarm interrupts the main thread wherever it is, and says where that was."""

from __future__ import annotations

import signal
import time

import pytest

from sparkdl.errors import DeadlineError
from sparkdl.process.interrupts import raise_after


def test_an_alarm_interrupts_what_hangs_and_says_where() -> None:
    before = signal.getsignal(signal.SIGALRM)
    call_off = raise_after(0.01, DeadlineError("late"))
    with pytest.raises(DeadlineError, match="late") as found:
        time.sleep(600)
    told = "\n".join(getattr(found.value, "__notes__", [str(found.value)]))
    assert "test_an_alarm_interrupts_what_hangs_and_says_where" in told
    call_off()
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_alarm_that_is_called_off_is_not_raised() -> None:
    raise_after(600.0, DeadlineError("late"))()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
