"""Processor time of a benchmark's process and all its descendants, by kind; Linux only.

Other work on the machine lengthens wall time a lot, but processor time hardly at all.
"""

import os
from collections.abc import Mapping
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
DRIVER, DRIVER_JVM, EXECUTOR_JVM, WORKER = (
    "driver's Python",
    "driver's JVM",
    "executors' JVMs",
    "Python workers",
)
Spent = Mapping[int, tuple[str, float]]


def spent() -> Spent:
    """Returns, by process ID, each process's kind and the seconds it has used since it began."""
    told = {int(each.name): each for each in Path("/proc").iterdir() if each.name.isdigit()}
    parents, seconds, commands = {}, {}, {}
    for process, folder in told.items():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            commands[process] = (folder / "cmdline").read_text()
        except OSError:  # the process has ended meanwhile
            continue
        parents[process] = int(fields[1])
        seconds[process] = (int(fields[11]) + int(fields[12])) * TICK_S
    ours = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {each: (_kind(each, commands[each]), seconds[each]) for each in ours}


def since(before: Spent) -> dict[str, float]:
    """Returns the seconds used since then, by kind, without processes that have ended since."""
    found: dict[str, float] = {}
    for process, (kind, seconds) in spent().items():
        found[kind] = found.get(kind, 0.0) + seconds - before.get(process, (kind, 0.0))[1]
    return {kind: round(seconds, 2) for kind, seconds in sorted(found.items())}


def _kind(process: int, command: str) -> str:
    if process == os.getpid():
        return DRIVER
    if "CoarseGrainedExecutorBackend" in command:
        return EXECUTOR_JVM
    return DRIVER_JVM if "org.apache.spark" in command else WORKER
