"""What the driver, Spark and each worker did in each tenth of a second of a first and a later fit.

Every Python process of the session looks at its main thread 100 times a second. A line says, for
each process that did something, which function of sparkdl its main thread was in most of the time,
and what that was waiting for or computing in the end. Of Spark it has the jobs, stages and tasks
that ran, by the event log. The time is that since the call of ``fit()``; the first step of the last
worker is marked. ``--session`` chooses the kind of session (``fit_session.py``), ``--later`` how
many fits come before the one that is shown.

It is a tool for looking, not a benchmark: the samples cost some percent.
"""

import collections
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

SAMPLE_S = 0.01
BIN_S = 0.1
SITE = "import sys; sys.path.append({here!r}); import timeline; timeline.sample({folder!r})\n"
"""A sitecustomize.py for the Python processes of executors."""
WAITS = ("threading", "selectors", "socket", "queue", "py4j", "subprocess")
"""Modules of the standard library, and py4j's, in which a thread only waits."""


def sample(folder: str) -> None:
    """Writes down what this process does from now on, and each that is forked from it."""
    os.register_at_fork(after_in_child=lambda: _begin(folder))
    _begin(folder)


def _begin(folder: str) -> None:
    path = Path(folder) / f"{os.getpid()}.txt"
    arguments = path.open("a", buffering=1 << 16), threading.main_thread().ident
    threading.Thread(target=_look, args=arguments, name="timeline", daemon=True).start()


def _look(file: TextIO, main: int) -> None:
    flushed = time.time()
    while True:
        time.sleep(SAMPLE_S)
        now, frame = time.time(), sys._current_frames().get(main)
        file.write(f"{now:.3f}\t{describe(frame)}\n")
        if now - flushed > BIN_S:
            file.flush()
            flushed = now


def describe(frame: FrameType | None) -> str:
    """Names the innermost function of sparkdl, and the innermost of all that is not a wait's."""
    ours, leaf, imports = "", "", ""
    while frame is not None:
        module, code = frame.f_globals.get("__name__") or "?", frame.f_code
        if code.co_name == "<module>" and module != "__main__" and not imports:
            imports = module
        frozen = module.startswith("importlib")
        if not leaf and not frozen and module.partition(".")[0] not in WAITS:
            leaf = f"{module}.{code.co_qualname}"
        if not ours and module.startswith("sparkdl.") and code.co_name != "<module>":
            ours = f"{module.removeprefix('sparkdl.')}.{code.co_qualname}"
        frame = frame.f_back
    inner = f"imports {imports}" if imports else leaf
    return ours if inner in ("", f"sparkdl.{ours}") else f"{ours} > {inner}".removeprefix(" > ")


def main() -> None:
    """Fits, and prints two tables."""
    import harness

    options = harness.parser(__doc__)
    options.add_argument("--session", default="created", choices=("plain", "created", "connect"))
    options.add_argument("--later", type=int, default=4, help="fits before the later one (4)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("samples", "events", "site", "digits"):
            (folder / each).mkdir()
        fits = run(folder, chosen.session, chosen.later)
        spark, processes = list(events(folder / "events")), read_samples(folder / "samples")
        for what, (called, first_step) in zip(("first", "later"), fits, strict=True):
            print(f"\n{what} fit, {chosen.session}: first step after {first_step - called:.2f} s")
            for line in table(called, first_step, processes, spark):
                print(line)


def run(folder: Path, kind: str, later: int) -> list[tuple[float, float]]:
    """Fits; returns when the first and the last were called, and when their first steps were."""
    import digits
    import fit_session

    here, samples = str(Path(__file__).parent), str(folder / "samples")
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(here=here, folder=samples))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    digits.write(folder / "digits")
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.executorEnv.PYTHONPATH": str(folder / "site"),
    }
    spark = fit_session.start_session(kind, conf)
    sample(samples)
    fits = []
    for number in range(later + 1):
        called = time.time()
        _, first = fit_session.fit_ours("averaging", spark, folder / "digits", 2, number)
        assert first is not None
        fits.append((called, first))
    time.sleep(2 * BIN_S)
    spark.stop()
    return [fits[0], fits[-1]]


def read_samples(folder: Path) -> dict[int, list[tuple[float, str]]]:
    """Returns by process what it did when."""
    found = {}
    for path in folder.iterdir():
        lines = (line.partition("\t") for line in path.read_text().splitlines())
        found[int(path.stem)] = [(float(at), what) for at, _, what in lines if what]
    return found


def events(folder: Path) -> Iterator[tuple[float, float, str]]:
    """Yields when each job, stage and task of Spark's began and ended, and its name."""
    began: dict[str, float] = {}
    for path in sorted(folder.rglob("*")):
        for line in path.read_text().splitlines() if path.is_file() else ():
            if not line.startswith("{"):
                continue
            event: Mapping[str, Any] = json.loads(line)
            kind = event["Event"].removeprefix("SparkListener")
            if kind == "JobStart":
                began[f"job {event['Job ID']}"] = event["Submission Time"] / 1000
            elif kind == "JobEnd":
                name = f"job {event['Job ID']}"
                yield began.pop(name), event["Completion Time"] / 1000, name
            elif kind == "TaskEnd":
                task = event["Task Info"]
                name = f"task {event['Stage ID']}.{task['Index']}"
                yield task["Launch Time"] / 1000, task["Finish Time"] / 1000, name


def table(
    called: float,
    first_step: float,
    processes: Mapping[int, Iterable[tuple[float, str]]],
    spark: Sequence[tuple[float, float, str]],
) -> Iterator[str]:
    """Yields the lines of one fit, to three tenths after its first step."""
    bins = int((first_step - called) / BIN_S) + 4
    done: list[dict[int, collections.Counter[str]]] = [{} for _ in range(bins)]
    for process, samples in processes.items():
        for at, what in samples:
            index = int((at - called) / BIN_S)
            if 0 <= index < bins and at >= called:
                done[index].setdefault(process, collections.Counter())[what] += 1
    busy = [p for p in processes if len({w for each in done for w in each.get(p, ())}) > 1]
    names = {os.getpid(): "driver"} | {p: f"pid {p}" for p in busy if p != os.getpid()}
    for index, processes_did in enumerate(done):
        since, until = called + index * BIN_S, called + (index + 1) * BIN_S
        active = sorted(name for begin, end, name in spark if begin < until and end > since)
        mark = "  <- first step" if since <= first_step < until else ""
        yield f"{index * BIN_S:5.1f} s  spark: {', '.join(active) or 'nothing'}{mark}"
        for process, name in names.items():
            counts = processes_did.get(process, collections.Counter())
            for what, count in counts.most_common(3):
                if 4 * count >= counts.total():
                    yield f"         {name}: {100 * count // counts.total():3d} % {what}"


if __name__ == "__main__":
    main()
