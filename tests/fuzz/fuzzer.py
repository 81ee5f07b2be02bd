"""The loop around every target: one input per number, and what may come of it.

Each input depends only on the target's name, a seed and its number, so that one that failed can be
made again without those before it. ``read_apart`` has many of them read in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import random
import resource
import struct
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from subprocesses import run_python

from sparkdl.errors import SparkDLError

MAX_GROWTH_MB = 256.0
"""The most memory that one input may take at its peak."""
MAX_HANGS = 20
"""The hanging inputs after which a run gives up: each takes its whole deadline."""
MAX_MEMORY_BYTES = 6 << 30
"""Private memory, including threads' stacks, beyond which ``main`` is refused any more."""
NUMBER = struct.Struct("q")
STUCK_S = 20.0
"""The longest that an input may take; then ``main`` ends itself, and says where it was."""
LEAVING_S = 10.0
"""Seconds for the threads that served an input to end."""


class Target(ExitStack):
    """Something that reads what others have sent or written; a context manager.

    What ``__enter__`` opens it gives to ``enter_context``, which has it closed at the end.

    Attributes:
        name: of the inputs; another name has others.
    """

    name: str

    def folder(self) -> Path:
        """An empty folder, in memory if it can be, which is deleted at the end."""
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        return Path(self.enter_context(TemporaryDirectory(prefix="fuzzing-", dir=memory)))

    @abstractmethod
    def attempt(self, draw: random.Random) -> bool:
        """Make one input and have it read.

        Args:
            draw: the only source of chance.

        Returns:
            Whether it was read as if nothing were wrong with it.

        Raises:
            SparkDLError: it was refused, as it should be.
            Fault: something is not as it has to be. Any other exception is a fault too.
        """


class Fault(Exception):
    """What was read had an effect that it must not have.

    Args:
        what: the effect, worded the same for every input that has it.
        why: what else is known.
    """

    def __init__(self, what: str, why: object = "") -> None:
        super().__init__(what)
        if why:
            self.add_note(str(why))


class Stuck(Fault):
    """An end that should have answered by now has not."""


@dataclass
class Finding:
    """Inputs that failed in the same way.

    Attributes:
        index: the number of the first of them.
        times: how many there were.
        text: what happened, with the traceback.
    """

    index: int
    times: int
    text: str


@dataclass
class Tally:
    """What came of some inputs.

    Attributes:
        tried: how many inputs were read.
        accepted: how many of them were read as if nothing were wrong with them.
        findings: the failures, by cause.
        early_mb: resident memory when a fifth of the inputs was done.
        late_mb: resident memory at the end.
    """

    tried: int = 0
    accepted: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)
    early_mb: float = 0.0
    late_mb: float = 0.0

    def note(self, cause: str, index: int, text: str) -> None:
        """Count a failed input."""
        finding = self.findings.setdefault(cause, Finding(index, 0, text))
        finding.times += 1


def run(
    target: Target,
    seed: int,
    indices: Iterable[int],
    *,
    on_input: Callable[[int], None] = lambda index: None,
) -> Tally:
    """Have a target that is already entered read its inputs.

    Args:
        target: reads the inputs.
        seed: the run's seed.
        indices: the numbers of the inputs.
        on_input: called before each input with its number.
    """
    tally, numbers, hangs = Tally(), list(indices), 0
    with _thread_errors() as errors, _logged_to_nobody():
        for index in numbers:
            on_input(index)
            before = _peak_mb(from_now=True)
            draw = random.Random(f"{target.name}/{seed}/{index}")
            try:
                tally.accepted += target.attempt(draw)
            except SparkDLError:
                pass
            except Exception as error:
                tally.note(*_described(error, index))
                hangs += isinstance(error, Stuck)
            tally.tried += 1
            for ended_with in errors:
                tally.note(*_described(ended_with, index, "a thread of its own: "))
            errors.clear()
            grown = _peak_mb() - before
            if grown > MAX_GROWTH_MB and tally.tried > 1:  # the first includes late imports
                tally.note("memory", index, f"the process grew by {grown:.0f} MB")
            if tally.tried == max(1, len(numbers) // 5):
                tally.early_mb = resident_mb()
            if hangs == MAX_HANGS:
                tally.note("too many inputs hang", index, "the rest was not tried")
                break
    tally.late_mb = resident_mb()
    return tally


def read_apart(kind: type[Target], seed: int, numbers: range, timeout_s: float) -> Tally:
    """Have a target read its inputs in a process of its own, which an input may kill.

    Args:
        kind: the target; its module is found by its name.
        seed: the run's seed.
        numbers: those of the inputs.
        timeout_s: the longest that the process may take.
    """
    with TemporaryDirectory(prefix="fuzzing-") as folder:
        reached, result = Path(folder, "reached"), Path(folder, "result")
        done = run_python(
            *("-c", "import fuzzer; fuzzer.main()", kind.__module__, kind.__name__, str(seed)),
            *(str(numbers.start), str(numbers.stop), reached, result),
            timeout=timeout_s,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                # Many short-lived threads with heaps of their own would look like a leak.
                "MALLOC_ARENA_MAX": "1",
            },
        )
        if result.exists():
            told = json.loads(result.read_text())
            found = {cause: Finding(**each) for cause, each in told.pop("findings").items()}
            return Tally(findings=found, **told)
        assert reached.exists(), done.stderr[-6_000:]
        (number,) = NUMBER.unpack(reached.read_bytes())
        tally = Tally(tried=number - numbers.start)
        tally.note(f"the process ended with {done.returncode}", number, done.stderr[-6_000:])
        return tally


def main() -> None:
    """Read the inputs that ``read_apart`` has named on the command line."""
    module, kind, *numbers, reached, result = sys.argv[1:]
    seed, first, end = map(int, numbers)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    torch.set_num_threads(1)
    target: Target = getattr(importlib.import_module(module), kind)()
    with target, open(reached, "wb", buffering=0) as file:

        def on_input(number: int) -> None:
            os.pwrite(file.fileno(), NUMBER.pack(number), 0)
            faulthandler.dump_traceback_later(STUCK_S, exit=True)

        tally = run(target, seed, range(first, end), on_input=on_input)
        faulthandler.cancel_dump_traceback_later()
    Path(result).write_text(json.dumps(asdict(tally)))


def stacks() -> str:
    """Where every thread is."""
    told, frames = [], sys._current_frames()
    for thread in threading.enumerate():
        if thread.ident in frames:
            lines = traceback.format_stack(frames[thread.ident], limit=8)
            told.append(f"thread {thread.name}:\n{''.join(lines)}")
    return "\n".join(told)


def resident_mb() -> float:
    """Memory that this process uses, once garbage and what the allocator keeps are released."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # other C libraries lack it
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def require_threads_gone() -> None:
    """Check that what was just closed has left none of the project's threads behind.

    Raises:
        Fault: a thread is left.
    """
    until = time.monotonic() + LEAVING_S
    while left := [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")]:
        if time.monotonic() > until:
            raise Fault(f"threads are left: {sorted(set(left))}", stacks())
        time.sleep(0.001)


def _peak_mb(*, from_now: bool = False) -> float:
    """Peak resident memory, ever or since this was last called with ``from_now``."""
    if from_now:
        with contextlib.suppress(OSError):  # where the peak cannot be reset, less is found
            Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _described(error: BaseException, index: int, where: str = "") -> tuple[str, int, str]:
    """Cause, number of the input, and the whole traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}sparkdl{os.sep}" in frame.filename]
    place = ""
    if ours:
        file = ours[-1].filename.rpartition(f"{os.sep}sparkdl{os.sep}")[2]
        place = f" in {file}, {ours[-1].name}"
    detail = f": {error}" if isinstance(error, Fault) else ""
    text = "".join(traceback.format_exception(error))[-12_000:]
    return f"{where}{type(error).__name__}{detail[:120]}{place}", index, text


@contextlib.contextmanager
def _thread_errors() -> Iterator[list[BaseException]]:
    """Collect the exceptions that end threads with a traceback."""
    errors: list[BaseException] = []

    def collect(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is not None:
            errors.append(told.exc_value)

    before, threading.excepthook = threading.excepthook, collect
    try:
        yield errors
    finally:
        threading.excepthook = before


class _Nowhere(io.TextIOBase):
    """Accepts text, checks that it is text, and discards it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _logged_to_nobody() -> Iterator[None]:
    """Have log messages formatted, but not shown."""
    handler, logger = logging.StreamHandler(_Nowhere()), logging.getLogger("sparkdl")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
