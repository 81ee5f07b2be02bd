"""One process of a run: every STEP-th input of a target, with coverage of what reads it.

    python -m fuzzing.shard TARGET SEED FIRST STEP END PROGRESS RESULT COVERAGE

The file PROGRESS holds the number of the input that is being read, so that the parent knows which
one killed this process. RESULT gets the tally when all is done.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import resource
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_MEMORY_BYTES = 6 << 30
"""Private memory, including threads' stacks, beyond which the process is refused any more."""
NUMBER = struct.Struct("q")
MIN_COVERED = 2_000
"""Inputs of a process for which coverage is measured, or a fifth of them if that is more."""


def main() -> None:
    name, *numbers, progress, result, coverage_file = sys.argv[1:]
    seed, first, step, end = map(int, numbers)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    coverage = _begun_coverage(coverage_file)
    # Imported only now, so that what runs at import counts as covered.
    import torch

    from fuzzing import target_of
    from fuzzing.loop import run

    torch.set_num_threads(1)
    with open(progress, "r+b") as file:
        shared = mmap.mmap(file.fileno(), NUMBER.size)
    numbers = range(first, end, step)
    # It keeps something for every thread there was, which would look like a leak.
    last_covered = numbers[: max(MIN_COVERED, len(numbers) // 5)][-1]

    def on_input(index: int) -> None:
        NUMBER.pack_into(shared, 0, index)
        if coverage is not None and index == last_covered + step:
            coverage.stop()

    with target_of(name) as target:
        tally = run(target, seed, numbers, on_input=on_input)
    if coverage is not None:
        coverage.stop()
        coverage.save()
    Path(result).write_text(json.dumps({"reads": target.reads, "tally": tally.as_json()}))


def _begun_coverage(data_file: str) -> Any:
    """A started measurement of the project's own coverage; None without a file to keep it in."""
    if not data_file:
        return None
    import coverage

    found = find_spec("sparkdl")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    begun = coverage.Coverage(data_file=data_file, include=[f"{folder}/*"], config_file=False)
    begun.start()
    return begun


if __name__ == "__main__":
    main()
