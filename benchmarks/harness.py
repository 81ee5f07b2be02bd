"""What all benchmarks share: interleaved repeats, claims, child processes and the last JSON line.

A benchmark measures ours and its peers in one run, in turns, so that a busy minute of the machine
hits all of them; it compares medians and says with numbers whether each claim was met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # what needs no Spark does not import it
    from pyspark.sql import SparkSession

FOLDER = Path(__file__).resolve().parent
CHILD_TIMEOUT_SECONDS = 600.0

Measured = TypeVar("Measured")


class Median(float):
    """A median, with what it is the median of.

    Args:
        values: the measurements.
        unit: theirs.
    """

    def __new__(cls, values: Sequence[float], unit: str = "") -> Median:
        """Takes the median."""
        made = super().__new__(cls, statistics.median(values))
        made.values, made.unit = values, unit
        return made

    values: Sequence[float]
    unit: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One ratio and the bound it is held to.

    Args:
        name: what is compared, as shown to the reader.
        ratio: the measured ratio, dimensionless.
        target: its bound.
        at_least: True where more is better (the ratio must reach the target), False where the
            ratio must not exceed it.
        ours: what was measured of ours, if the ratio is of two measurements.
        peer: the same of the other side.
    """

    name: str
    ratio: float
    target: float
    at_least: bool = False
    ours: float | None = None
    peer: float | None = None

    @property
    def met(self) -> bool:
        """True when the ratio is on the right side of the target."""
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def __str__(self) -> str:
        bound = "at least" if self.at_least else "at most"
        verdict = "met" if self.met else "MISSED"
        return f"{self.name}: {self.ratio:.3f} ({bound} {self.target:g}): {verdict}"

    def as_json(self) -> dict[str, Any]:
        """Returns what the last line of a benchmark has of it."""
        told = {
            "name": self.name,
            "ratio": round(self.ratio, 4),
            "target": self.target,
            "bound": "at least" if self.at_least else "at most",
            "met": self.met,
            "ours": self.ours,
            "peer": self.peer,
        }
        if isinstance(self.ours, Median):
            values = self.ours.values
            told |= {"n": len(values), "spread": [min(values), max(values)], "unit": self.ours.unit}
        return told


def claim(name: str, ours: float, peer: float, *, target: float, at_least: bool = False) -> Claim:
    """Returns the claim about ours / the other side's."""
    return Claim(
        name=name, ratio=ours / peer, target=target, at_least=at_least, ours=ours, peer=peer
    )


def faster(name: str, ours: float, peer: float, *, target: float) -> Claim:
    """Returns the claim that the other side takes so many times as long as ours."""
    return Claim(name=name, ratio=peer / ours, target=target, at_least=True, ours=ours, peer=peer)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common options ``--repeats`` and ``--quick``."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--repeats", type=int, help="measurements of each contender")
    result.add_argument("--quick", action="store_true", help="few repeats: a check, not a result")
    result.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return result


def parse(
    options: argparse.ArgumentParser,
    *,
    repeats: int | None = None,
    quick_repeats: int | None = 1,
    child: Callable[..., Any] | None = None,
) -> argparse.Namespace:
    """Parses the command line and fills in ``repeats``, which must be at least 1.

    Args:
        options: of ``parser``.
        repeats: how often each contender is measured by default.
        quick_repeats: how often with ``--quick``.
        child: what ``call_child`` has a process of its own do, which then ends.
    """
    parsed = options.parse_args()
    if parsed.child is not None and child is not None:
        print(json.dumps(child(*parsed.child)), flush=True)
        raise SystemExit
    if parsed.repeats is None:
        parsed.repeats = quick_repeats if parsed.quick else repeats
    if parsed.repeats is not None and parsed.repeats < 1:
        options.error(f"--repeats must be at least 1, got {parsed.repeats}")
    return parsed


Part = Callable[[argparse.Namespace], tuple[list[Claim], dict[str, Any]]]
"""Measures; returns the claims and the figures behind them."""


def measure_parts(
    benchmark: str,
    options: argparse.ArgumentParser,
    parts: Mapping[str, tuple[Part, int, int]],
    *,
    default: Sequence[str] | None = None,
    child: Callable[..., Any] | None = None,
) -> None:
    """Measures those parts of a benchmark that the command line names, and reports.

    Args:
        benchmark: its name.
        options: of ``parser``.
        parts: by name, with their repeats by default and with ``--quick``.
        default: those that are measured if none is named; all if left out.
        child: as for ``parse``.
    """
    usual = [*(default or parts)]
    options.add_argument(
        "parts",
        nargs="*",
        default=usual,
        choices=[usual, *parts],  # of what is left out, argparse asks whether it is a choice too
        metavar="PART",
        help=f"of {', '.join(parts)}; {' and '.join(usual)} if left out",
    )
    chosen = parse(options, quick_repeats=None, child=child)
    claims: list[Claim] = []
    measured: dict[str, Any] = {}
    for name in chosen.parts:
        part, repeats, quick_repeats = parts[name]
        given = {"repeats": chosen.repeats or (quick_repeats if chosen.quick else repeats)}
        found, measured[name] = part(argparse.Namespace(**{**vars(chosen), **given}))
        claims += found
    report(benchmark, claims, measured)


def interleave(
    contenders: Mapping[str, Callable[[], Measured]], *, repeats: int, warmups: int = 0
) -> dict[str, list[Measured]]:
    """Measures every contender in turn, ``repeats`` times over.

    Args:
        contenders: name to a function that runs once and returns what it measured.
        repeats: number of kept measurements each.
        warmups: number of earlier turns that are thrown away.

    Returns:
        name to its ``repeats`` measurements, in order.
    """
    for _ in range(warmups):
        for run in contenders.values():
            run()
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            measured[name].append(run())
    return measured


def show(name: str, values: Sequence[float], *, unit: str = "s", digits: int = 4) -> Median:
    """Prints median, range and count of some measurements and returns the median."""
    middle = Median(values, unit)
    low, high = min(values), max(values)
    print(
        f"{name}: median {middle:,.{digits}f} {unit} "
        f"[{low:,.{digits}f} to {high:,.{digits}f}], n={len(values)}",
        flush=True,
    )
    return middle


def show_each(
    measured: Mapping[str, Sequence[float]], text: str = "{}", **options: Any
) -> dict[str, Median]:
    """Shows what each contender measured; returns the medians.

    Args:
        measured: by contender.
        text: what to call it, with the contender's name in place of ``{}``.
        options: as ``show`` takes them.
    """
    return {name: show(text.format(name), each, **options) for name, each in measured.items()}


def report(benchmark: str, claims: Sequence[Claim], measured: Mapping[str, Any]) -> None:
    """Prints each claim, then the one JSON line that ends every benchmark.

    Args:
        benchmark: name of the benchmark.
        claims: at least one; the first is the headline.
        measured: the figures behind the ratios, JSON-serialisable, with units in their names.
    """
    for each in claims:
        print(each)
    detail = {
        "claims": [each.as_json() for each in claims],
        **measured,
        "machine": _machine(),
    }
    line = {
        "benchmark": benchmark,
        "ratio": round(claims[0].ratio, 4),
        "target": claims[0].target,
        "detail": detail,
    }
    print(json.dumps(line), flush=True)


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    for package in ("torch", "pyspark", "pyarrow", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # what needs no Spark runs without
            found[package] = None
    return found


def child_environment(
    python: str | Path = sys.executable, *, source: Path = FOLDER.parent
) -> dict[str, str]:
    """Returns the environment in which children, and executors below them, find our modules.

    Args:
        python: the interpreter that the executors are to run.
        source: the checkout whose sparkdl they import.
    """
    environment = dict(os.environ)
    roots = [str(FOLDER), str(source.resolve()), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(root for root in roots if root)
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = str(python)
    return environment


def run_child(command: Sequence[str | Path], **options: Any) -> dict[str, Any]:
    """Runs a command whose last line of standard output is a JSON object, and returns that object.

    Args:
        command: the program and its arguments.
        options: as ``run_to_end`` takes them.

    Raises:
        RuntimeError: as there, or the child printed no JSON.
    """
    output, errors = run_to_end(command, **options)
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(_failure(command, "no JSON line at the end", output, errors)) from error
    return dict(result)


def call_child(script: str, *given: Any, **options: Any) -> dict[str, Any]:
    """Has a process of its own call what a script hands to ``parse`` as its child.

    Args:
        script: its ``__file__``.
        given: the function's arguments, JSON-serialisable.
        options: as ``run_to_end`` takes them.
    """
    found = run_child([sys.executable, script, "--child", json.dumps(given)], **options)
    print(f"  {', '.join(map(str, given))}: {found}", flush=True)
    return found


def run_to_end(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = CHILD_TIMEOUT_SECONDS,
    folder: Path | None = None,
) -> tuple[str, str]:
    """Runs a command, and returns what it wrote to standard output and to standard error.

    Args:
        command: the program and its arguments.
        environment: the child's whole environment; ``child_environment()`` if left out.
        timeout: seconds after which the child and everything that it started is killed.
        folder: where it runs; here by default.

    Raises:
        RuntimeError: the child failed or ran past the timeout; its last lines of output are in the
            message.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        env=dict(environment) if environment is not None else child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,  # so that a JVM below it can be ended with it
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        message = _failure(command, f"still ran after {timeout:g} s", output, errors)
        raise RuntimeError(message) from expired
    if process.returncode != 0:
        raise RuntimeError(_failure(command, f"exit code {process.returncode}", output, errors))
    return output, errors


_OF_A_JVM = re.compile(r"\s+at [\w.$]+\(|\d\d/\d\d/\d\d [\d:]+ |(Caused by: )?(java|org\.apache)\.")


def _failure(command: Sequence[str | Path], what: str, output: str, errors: str) -> str:
    # A JVM that ends says so at length, after the reason for its end.
    said = [line for line in (output + "\n" + errors).splitlines() if not _OF_A_JVM.match(line)]
    tail = "\n".join(said[-40:]).strip()
    return f"{' '.join(map(str, command))}: {what}. Its last lines:\n{tail}"


def peer_python(peer: str) -> Path:
    """Returns the Python of a peer's own environment, which is installed if it is not there.

    Args:
        peer: ``elephas`` or ``petastorm``.
    """
    made = subprocess.run(
        [FOLDER / "peers" / "environment.sh", peer],
        env=child_environment() | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())


MASTER = "local-cluster[2,1,2048]"
CONF = {
    "spark.executor.memory": "2048m",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}
"""Of every session, whoever's it is, but for what a script sets otherwise."""


def session(
    master: str = MASTER, conf: Mapping[str, str] = CONF, *, connect: bool = False
) -> SparkSession:
    """Starts a Spark session as users build it; ``child_environment`` must be in force.

    Args:
        master: where it runs.
        conf: its settings, besides those of ``CONF``.
        connect: whether it is a client of Spark Connect, whose server this process starts.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    builder = builder.remote(master) if connect else builder.master(master).appName("benchmark")
    for key, value in {**CONF, **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def status_bytes(field: str, process: int | None = None) -> int:
    """Returns a memory figure of a process, this one by default, in bytes."""
    status = Path(f"/proc/{process or os.getpid()}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status} has no {field}: this benchmark needs Linux")


@dataclass(frozen=True)
class Process:
    """One process as it is now.

    Attributes:
        parent: the ID of the process that started it.
        command: its command line.
        seconds: of processor time that it has used.
    """

    parent: int
    command: str
    seconds: float


def processes() -> dict[int, Process]:
    """Returns this process and all below it, by ID; Linux only."""
    told = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            command = (folder / "cmdline").read_text()
            told[int(folder.name)] = Process(int(fields[1]), command, seconds)
    ours = {os.getpid()}
    while more := {each for each, process in told.items() if process.parent in ours} - ours:
        ours |= more
    return {each: told[each] for each in ours}


def timed(call: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Calls a function; returns the seconds, and those that processors spent on JVMs and on Python.

    Other work on the machine lengthens the former a lot, but the latter hardly at all. Processes
    that have ended meanwhile are left out.
    """
    before, began = processes(), time.perf_counter()
    call()
    seconds, spent = time.perf_counter() - began, {"JVMs": 0.0, "Python": 0.0}
    for each, process in processes().items():
        kind = "JVMs" if "org.apache.spark" in process.command else "Python"
        spent[kind] += process.seconds - (before[each].seconds if each in before else 0.0)
    return seconds, {kind: round(each, 2) for kind, each in spent.items()}
