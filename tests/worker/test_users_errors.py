"""Whatever the user's code raises on a worker ends the run, by name and cut to size."""

from __future__ import annotations

import json
import signal

import pytest
from misbehaving import Marked, marked
from subprocesses import run_python
from toys import classification, make_job, mlp

from sparkdl.averager.messages.headers import failure_header, stopped_header
from sparkdl.errors import CollectiveError, WorkerError
from sparkdl.testing import run_world
from sparkdl.transport.framing import MAX_HEADER_BYTES, header_message
from sparkdl.worker_callback import WorkerCallback, WorkerStep

pytestmark = pytest.mark.usefixtures("nobody_stays")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoException(BaseException):
    pass


class CannotBePickled(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


RAISED = {
    "Silent: <exception str": Silent(),
    "NoException: of its own": NoException("of its own"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(),
    "SystemExit: out of here": SystemExit("out of here"),
    "SystemExit: 3": SystemExit(3),
    "SystemExit: 0": SystemExit(0),
    "ValueError: zz": ValueError("z" * 50_000_000),
    "ValueError: half": ValueError("half \ud800 a pair"),
    "CannotBePickled: x": CannotBePickled("x"),
}


class RaisesAt(Marked):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = [error]  # copied with the model, as nobody can copy every exception

    def __deepcopy__(self, memo: dict[int, object]) -> RaisesAt:
        return RaisesAt(self.error[0])

    def at_mark(self) -> None:
        raise self.error[0]


@pytest.mark.parametrize("named", RAISED)
def test_whatever_a_model_raises_is_the_workers_error(named: str) -> None:
    job = make_job(RaisesAt(RAISED[named]), max_failures=3)
    with pytest.raises(WorkerError, match="rank 1, epoch 1, step 3") as caught:
        run_world(job, marked([12, 12], 12 + 9).shards())
    assert named in str(caught.value)
    assert "in at_mark" in caught.value.worker_traceback
    assert len(str(caught.value)) < 30_000
    str(caught.value).encode()


@pytest.mark.parametrize("named", RAISED)
def test_whatever_a_callback_on_a_worker_raises_names_the_callback(named: str) -> None:
    class Fails(WorkerCallback):
        def after_step(self, step: WorkerStep) -> None:
            raise RAISED[named]

    job = make_job(mlp(), callbacks=(Fails(),))
    with pytest.raises(WorkerError) as caught:
        run_world(job, classification([8]).shards())
    assert "callback Fails failed in after_step" in str(caught.value)
    assert named in str(caught.value)


def test_no_error_makes_a_header_too_long() -> None:
    text = "\U0001f525" * 20_000_000
    worker = WorkerError(text, rank=0, epoch=0, step=0, worker_traceback=text)
    for header in (
        failure_header(worker),
        failure_header(CollectiveError(text)),
        stopped_header(text),
    ):
        assert len(header_message(header)) < MAX_HEADER_BYTES


INTERRUPTED = """
import json, os, signal, sys
from sparkdl.process.interrupts import Interrupted, interrupted_by_signals_alone
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
caught = {}
with interrupted_by_signals_alone():
    for name, interrupt in {
        "raised": lambda: exec("raise KeyboardInterrupt"),
        "sent": lambda: os.kill(os.getpid(), signal.SIGINT),
    }.items():
        try:
            interrupt()
        except KeyboardInterrupt as error:
            caught[name] = isinstance(error, Interrupted)
    print(json.dumps(caught), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""


def test_an_interrupt_of_the_process_differs_from_one_that_the_user_raises() -> None:
    ended = run_python("-c", INTERRUPTED)
    assert json.loads(ended.stdout) == {"raised": False, "sent": True}
    assert ended.returncode == -signal.SIGINT
