"""What the workers of ``sparkdl.run`` send to the driver, and what it then shows of that."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from fuzzing.calling import Call, Message, Place, any_way, conversation
from fuzzing.loop import Fault, Target, require_threads_gone
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.transport.service import Service


class RunTarget(Target):
    """A whole run of one or two workers; once they have left, it has finished, failed or waits."""

    name = "run"
    reads = (
        "spark/diagnostics/run_service.py",
        "spark/diagnostics/stacks.py",
        "spark/diagnostics/console.py",
        "transport/service.py",
        "transport/channel.py",
    )

    def attempt(self, draw: random.Random) -> bool:
        """One run."""
        workers = draw.choice([1, 1, 2])
        proved = True
        with ExitStack() as stack:
            service = stack.enter_context(Service("127.0.0.1", encrypted=draw.random() < 0.1))
            run = stack.enter_context(RunService(service, workers, Display("its log")))
            stack.enter_context(_shown(run))
            address = run.address
            place = Place(*address.host_and_port, address.token, address.fingerprint)
            lines = [stack.enter_context(Call(place, any_way(draw))) for _ in range(workers)]
            steps = [draw.choice(["gather", "lines", "report", "stacks"]) for _ in range(3)]
            fails = draw.random() < 0.1
            # A worker that has to wait for others sends nothing more before it has heard of them.
            wrong = workers > 1 and steps.count("gather") > 1
            for rank, line in enumerate(lines):
                octets, changed = conversation(draw, _messages(steps, rank, fails=fails))
                known = draw.random() > 0.05
                wrong, proved = wrong or changed or fails, proved and known
                line.send(line.proof(line.hello(), None if known else "wrong") + octets)
                if not known:
                    line.answer()
            if not proved:
                # Workers that wait for one that never came.
                stack.close()
            for line in lines if proved else []:
                line.answer()
            failure, finished, missing = run.failure, run.all_finished, run.missing
        require_threads_gone()
        # A rank that has not said who it is may still come; the driver's watch limits how long.
        if proved and failure is None and not finished and not missing:
            raise Fault("a run is neither finished nor failed, though its workers have left")
        if proved and not wrong and not finished:
            raise Fault("a run in which nothing was wrong failed", repr(failure))
        if failure is not None:
            raise failure
        return finished


def _messages(steps: list[str], rank: int, *, fails: bool) -> list[Message]:
    told: dict[str, Message] = {
        "gather": {"gather": {"host": "h", "port": 5}},
        "lines": {"lines": ["one", "two"], "left_out": 0},
        "report": {"report": {"loss": 0.5, "step": 3}},
        "stacks": {"stacks": "thread MainThread, most recent call last:\n  File ..."},
    }
    failure: Message = {"failure": {"message": "m", "traceback": "t"}}
    failure["failure"] |= {"of_data": False, "of_exchange": False}
    leaves: Message = failure if fails else {"finish": True}
    return [{"attend": rank, "host": "h", "pid": 1}, *(told[step] for step in steps), leaves]


@contextmanager
def _shown(run: RunService) -> Iterator[None]:
    """Show meanwhile what is reported, as the driver does: a worker waits for it."""
    over = threading.Event()

    def show() -> None:
        while not over.is_set():
            run.show_next(0.02)

    thread = threading.Thread(target=show, name="shows")
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
