"""What the workers of a fit print, and what they answer when they are asked for their stacks."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fuzzing.calling import Call, Message, Place, any_way, conversation
from fuzzing.loop import Fault, Target, require_threads_gone
from sparkdl.spark.diagnostics.console import Console, Display
from sparkdl.transport.service import Service

HELD = "[rank 7] held\n"


class ConsoleTarget(Target):
    """Lines have to be shown as far as they are right, and another worker's all the same."""

    name = "console"
    reads: tuple[str, ...] = (
        "spark/diagnostics/console.py",
        "spark/diagnostics/stacks.py",
        "transport/service.py",
        "transport/channel.py",
    )

    def __enter__(self) -> ConsoleTarget:
        self._pool = self.enter_context(ThreadPoolExecutor(1))
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One console and one worker that misbehaves."""
        shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
        before, sys.stdout = sys.stdout, shown
        try:
            with (
                Service("127.0.0.1", encrypted=draw.random() < 0.1) as service,
                Console(service, Display("the executor's log")) as console,
            ):
                address = console.address
                place = Place(*address.host_and_port, address.token, address.fingerprint)
                wrong = self._speak(draw, console, place)
                with Call(place) as other:
                    messages: list[Message] = [{"attend": 7, "host": "h", "pid": 1}]
                    messages += [{"lines": ["held"], "left_out": 0}, {"finish": True}]
                    octets, _ = conversation(_Never(), messages)
                    other.send(other.proof(other.hello()) + octets)
                    other.answer()
        finally:
            sys.stdout = before
        require_threads_gone()
        shown.flush()
        text = shown.buffer.getvalue().decode()  # type: ignore[attr-defined]
        if not text.endswith(HELD):
            raise Fault("what another worker printed was not shown")
        if not wrong and "[rank 1] two\n" not in text:
            raise Fault("what a worker printed was not shown")
        return "[rank 1] two\n" in text

    def _speak(self, draw: random.Random, console: Console, place: Place) -> bool:
        lines: Message = {"lines": ["one", "two"], "left_out": draw.choice([0, 3])}
        messages: list[Message] = [{"attend": 1, "host": "h", "pid": 12}, *[lines] * 2]
        octets, wrong = conversation(draw, [*messages, {"finish": True}])
        known = draw.random() > 0.1
        with Call(place, any_way(draw)) as line:
            line.send(line.proof(line.hello(), None if known else "wrong") + octets)
            line.answer()
        return wrong or not known


class StacksTarget(ConsoleTarget):
    """The same while the driver asks for stacks: it must get text, and in time."""

    name = "stacks"
    reads = ("spark/diagnostics/stacks.py", "spark/diagnostics/console.py")

    def _speak(self, draw: random.Random, console: Console, place: Place) -> bool:
        joins: Sequence[Message] = [{"attend": 1, "host": "h", "pid": 12}]
        said, wrong = conversation(draw, joins)
        answer, bad = conversation(draw, [{"stacks": "thread MainThread:\n..."}, {"finish": True}])
        with Call(place, any_way(draw)) as line:
            line.send(line.proof(line.hello()) + said)
            ranks = draw.choice([None, [1], [0, 1], []])
            asked = self._pool.submit(console.stacks.ask, ranks)
            line.send(answer)
            line.answer()
            text = asked.result(timeout=10)
        if not isinstance(text, str):
            raise Fault(f"the stacks are {text!r}")
        with Call(place) as line:
            octets, _ = conversation(_Never(), [*joins, {"lines": ["two"], "left_out": 0}])
            line.send(line.proof(line.hello()) + octets)
            line.answer()
        return wrong or bad


class _Never(random.Random):
    """A source of chance that changes nothing."""

    def choice(self, seq: Sequence[int]) -> int:  # type: ignore[override]
        return seq[0]
