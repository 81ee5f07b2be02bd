"""Inputs spread over processes: one that dies or gets stuck costs its input, not the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fuzzing.loop import Tally
from fuzzing.shard import NUMBER

FOLDER = Path(__file__).resolve().parent
STARTING_S = 300.0
"""Seconds for a process to import what it needs, and to end."""
STUCK_S = 60.0
"""Seconds after which an input is no longer waited for; more than any target's own deadline."""
MAX_DEATHS = 5
"""The deaths of processes after which a shard is given up."""


@dataclass
class Outcome:
    """What came of a target.

    Attributes:
        tally: the tally of all its inputs.
        covered: for each file that reads them, the share of its lines that were executed.
        missed: for each file, the lines that were not.
    """

    tally: Tally
    covered: dict[str, float] = field(default_factory=dict)
    missed: dict[str, list[int]] = field(default_factory=dict)


def spread(name: str, seed: int, inputs: int, processes: int, *, with_coverage: bool) -> Outcome:
    """Have a target read its inputs in several processes.

    Args:
        name: the target's name.
        seed: the run's seed.
        inputs: the number of inputs.
        processes: the number of processes that share them.
        with_coverage: whether to record which lines are executed; it takes a third longer.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzzing-") as scratch:
        folder = Path(scratch)
        shards = [
            _Shard(name, seed, first, processes, inputs, folder, with_coverage=with_coverage)
            for first in range(processes)
        ]
        waiting = list(shards)
        while waiting:
            waiting = [shard for shard in waiting if not shard.look()]
            time.sleep(0.1)
        outcome = Outcome(Tally())
        for shard in shards:
            outcome.tally.add(shard.tally)
        outcome.tally.seconds = time.monotonic() - started
        if with_coverage:
            reads = max((shard.reads for shard in shards), key=len)
            _add_coverage(outcome, reads, folder)
    return outcome


class _Shard:
    """The process that reads every ``step``-th input, restarted after an input that killed it."""

    def __init__(
        self,
        name: str,
        seed: int,
        first: int,
        step: int,
        end: int,
        folder: Path,
        *,
        with_coverage: bool,
    ) -> None:
        self.tally = Tally()
        self.reads: list[str] = []
        self._key = (name, str(seed))
        self._step, self._end = step, end
        self._folder = folder
        self._name = f"{first}"
        self._with_coverage = with_coverage
        self._deaths = 0
        self._done = False
        self._start(first)

    def look(self) -> bool:
        """Check on the process; returns whether the shard is done."""
        if not self._done and self._process.poll() is None:
            self._end_if_stuck()
        elif not self._done:
            self._done = self._take_result()
        return self._done

    def _take_result(self) -> bool:
        """Take what the ended process found; returns whether nothing is left to do."""
        if self._result.exists():
            told = json.loads(self._result.read_text())
            self.reads = told["reads"]
            self.tally.add(Tally.from_json(told["tally"]))
            return True
        last_words = self._errors.read_text(errors="replace")[-6_000:]
        index = self._index()
        if index < 0:
            raise RuntimeError(f"the shard of {self._key[0]} did not start:\n{last_words}")
        self.tally.note(self._how_it_ended(), index, last_words)
        self.tally.tried += 1 + (index - self._first) // self._step
        self._deaths += 1
        if self._deaths == MAX_DEATHS:
            self.tally.note("too many processes died", index, "the rest was not tried")
            return True
        if index + self._step >= self._end:
            return True
        self._start(index + self._step)
        return False

    def _start(self, first: int) -> None:
        self._first = first
        part = f"{self._name}.{self._deaths}"
        self._progress = self._folder / f"progress.{part}"
        self._progress.write_bytes(NUMBER.pack(-1))
        self._result = self._folder / f"result.{part}"
        self._errors = self._folder / f"errors.{part}"
        numbers = map(str, (first, self._step, self._end))
        covered = str(self._folder / f".coverage.{part}") if self._with_coverage else ""
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fuzzing.shard", *self._key, *numbers),
                    *(str(self._progress), str(self._result), covered),
                ],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | _environment(),
            )
        self._moved, self._seen, self._stuck = time.monotonic(), -1, False

    def _index(self) -> int:
        (index,) = NUMBER.unpack(self._progress.read_bytes())
        return int(index)

    def _end_if_stuck(self) -> None:
        index, now = self._index(), time.monotonic()
        if index != self._seen:
            self._seen, self._moved = index, now
        # It interrupts itself at the deadline, unless native code prevents that.
        ends = index < 0 or index + self._step >= self._end
        if now - self._moved > (STARTING_S if ends else STUCK_S):
            self._stuck, self._moved = True, now
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGABRT)  # makes it write its stacks

    def _how_it_ended(self) -> str:
        if self._stuck:
            return "the process stood still"
        code = self._process.returncode
        return f"the process died ({signal.Signals(-code).name if code < 0 else code})"


def _environment() -> Mapping[str, str]:
    before = os.environ.get("PYTHONPATH", "")
    roots = [str(FOLDER.parent), str(FOLDER.parent.parent), before]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, roots)),
        "OMP_NUM_THREADS": "1",
        # Many short-lived threads with heaps of their own would look like a leak for a long time.
        "MALLOC_ARENA_MAX": "1",
    }


def _add_coverage(outcome: Outcome, reads: Sequence[str], folder: Path) -> None:
    import coverage

    found = find_spec("sparkdl")
    assert found is not None
    assert found.origin is not None
    total = coverage.Coverage(data_file=str(folder / ".coverage"), config_file=False)
    total.combine([str(folder)])
    for file in reads:
        _, statements, _, missing, _ = total.analysis2(str(Path(found.origin).parent / file))
        outcome.covered[file] = 1 - len(missing) / max(1, len(statements))
        outcome.missed[file] = missing
