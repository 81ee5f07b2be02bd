"""A job's output is there whole or not at all, wherever an attempt is cut off."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from every_row import every
from object_store import Killed, ObjectStore
from power_loss import cuts, recorded

from sparkdl.durable import lease
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import CheckpointError, ConfigError, InUseError
from sparkdl.jobs.output import MARKER, MOVING, Location, Output, Run

NAMES = ("module.json", "metadata/part-00000", "part-1")


@pytest.fixture(autouse=True)
def without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at once, and expire at once on stores without locks."""
    monkeypatch.setattr(lease, "GRACE_S", 0.05)
    monkeypatch.setattr(lease, "EXPIRES_S", 0.01)
    monkeypatch.setattr(lease, "RENEWED_EVERY_S", 0.05)
    monkeypatch.setattr(lease, "RETRY_S", 0.01)


def run_of(run_id: str | None, configuration: str = "c", job: str = "train") -> Run:
    return Run(job=job, run_id=run_id, configuration_sha256=configuration)


def local(path: Path) -> Location:
    return Location(files=LocalFiles(), path=str(path), renames=True)


def stored(store: ObjectStore) -> Location:
    return Location(files=store, path="bucket/out", renames=False)


def attempt(
    place: Location, run: Run, names: tuple[str, ...] = NAMES
) -> tuple[dict[str, Any], bool]:
    """Make the output if it is to be made; its result, and whether it was made now."""
    output = Output(place, run)
    with output.claimed("test") as done:
        if done is not None:
            return done, False
        for name in names:
            path = f"{output.staged}/{name}"
            place.files.create_dir(os.path.dirname(path), recursive=True)
            with place.files.open_output_stream(path) as file:
                file.write(json.dumps([name, run.run_id]).encode())
        if output.checkpoints is not None:
            place.files.create_dir(output.checkpoints, recursive=True)
            with place.files.open_output_stream(f"{output.checkpoints}/state") as file:
                file.write(str(run.run_id).encode())
        return output.commit({"status": "complete"}), True


def found(files: Any, path: str) -> str | None:
    """Of which run a whole output is; None where there is no marker."""
    output = Output(Location(files=files, path=path, renames=True), run_of(None))
    marker = output._result_at(path)
    if marker is None:
        return None
    there = dict(output._walk(path))
    assert there == marker["files"]
    assert set(there) == set(NAMES)
    for name in NAMES:
        with files.open_input_stream(f"{path}/{name}") as file:
            assert json.loads(file.read()) == [name, marker["run_id"]]
    return str(marker["run_id"])


def test_a_run_is_made_once_and_another_takes_its_place(tmp_path: Path) -> None:
    place = local(tmp_path / "models" / "out")
    assert attempt(place, run_of("a"))[1]
    result, again = attempt(place, run_of("a"))
    assert not again
    assert (result["run_id"], result["status"]) == ("a", "complete")
    assert result["files"]["module.json"] == len('["module.json", "a"]')
    assert attempt(place, run_of("b"))[1]
    assert found(place.files, place.path) == "b"
    assert os.listdir(tmp_path / "models") == ["out"]


def test_without_an_id_each_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    place = local(tmp_path / "out")
    assert [attempt(place, run_of(None))[1] for _ in range(2)] == [True, True]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("runs", "draws"), [("ab", 0), pytest.param("abc", 4, marks=pytest.mark.nightly)]
)
def test_whenever_the_power_is_cut_an_output_is_whole_and_the_next_attempt_finishes(
    memory: Path, runs: str, draws: int
) -> None:
    (disk := memory / "disk").mkdir()
    with recorded(disk) as recorder:
        for number, run_id in enumerate(runs):
            attempt(local(disk / "out"), run_of(run_id))
            recorder.note(number)
    assert len(recorder.points) > 100
    for point, left in cuts(recorder, memory, draws=draws):
        promised = max(point.returned, default=-1)
        now = found(LocalFiles(), str(left / "out"))
        if now is not None:
            assert promised <= runs.index(now) <= promised + 1
        elif promised >= 0:  # between its two renames the output is beside
            assert found(LocalFiles(), str(left / "out.sparkdl-replaced")) == runs[promised]
        wanted = runs[min(promised + 1, len(runs) - 1)]
        result, made = attempt(local(left / "out"), run_of(wanted))
        assert found(LocalFiles(), str(left / "out")) == wanted == result["run_id"]
        assert made <= (now != wanted)
        assert os.listdir(left) == ["out"], "the debris was not swept"
        shutil.rmtree(left)


@every("then", ["the same run", "another run"])
def test_a_store_that_renames_no_directory_has_a_marker_only_on_what_is_whole(then: str) -> None:
    died = 0
    while True:
        store = ObjectStore()
        attempt(stored(store), run_of("a"))
        store.changes, store.dies_after = 0, died
        try:
            attempt(stored(store), run_of("b"))
        except Killed:
            pass
        else:
            break
        store.dies_after = None
        assert found(store, "bucket/out") in (None, "a", "b")
        wanted = "b" if then == "the same run" else "c"
        with contextlib.suppress(HalfDone), Output(stored(store), run_of(wanted)).claimed():
            raise HalfDone  # what it has cleared is not missed by the next attempt
        attempt(stored(store), run_of(wanted))
        assert found(store, "bucket/out") == wanted
        assert all(name.startswith("bucket/out/") for name in store.objects)
        died += 1
    assert died > 20


def test_a_decided_run_is_published_and_not_made_again() -> None:
    """The process was killed when all but the publishing was done."""
    store, made = ObjectStore(), []
    for dies_after in range(40):
        store = ObjectStore(dies_after)
        try:
            attempt(stored(store), run_of("a"))
        except Killed:
            store.dies_after = None
            decided = any("staged" in n and n.endswith(f"/{MARKER}") for n in store.objects)
            made.append((decided, attempt(stored(store), run_of("a"))[1]))
    assert (True, False) in made
    assert (True, True) not in made


@pytest.mark.parametrize("run_id", ["a", "b"])
def test_what_came_to_the_outputs_place_after_an_attempt_was_killed_is_not_replaced(
    run_id: str,
) -> None:
    """It may have been killed at any moment before it began to move its files there."""
    refused = 0
    for dies_after in range(40):
        store = ObjectStore(dies_after)
        with contextlib.suppress(Killed):
            attempt(stored(store), run_of("a"))
        store.dies_after = None
        if any(name.startswith("bucket/out/") for name in store.objects):
            break
        store.objects["bucket/out/precious"] = b"of somebody else"
        if not any(name.endswith(MOVING) for name in store.objects):
            for _ in range(2):
                with pytest.raises(ConfigError, match="was not written by a job"):
                    attempt(stored(store), run_of(run_id))
            refused += 1
            assert store.objects["bucket/out/precious"] == b"of somebody else"
            store.delete_file("bucket/out/precious")
            attempt(stored(store), run_of(run_id))
        assert found(store, "bucket/out") in (None, run_id)
    assert refused > 5


def test_a_decided_run_waits_for_whoever_took_its_place_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    place = local(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_publish", killed)
        with pytest.raises(Killed):
            attempt(place, run_of("a"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ConfigError, match="was not written by a job"):
        attempt(place, run_of("a"))
    (tmp_path / "out" / "precious").unlink()
    assert attempt(place, run_of("a"))[1] is False
    assert found(LocalFiles(), str(tmp_path / "out")) == "a"


def fail(place: Location, run: Run) -> None:
    """Break off halfway; whether the checkpoint of an attempt before was there."""
    output = Output(place, run)
    with output.claimed():
        state = Path(str(output.checkpoints)) / "state"
        was_there = state.exists()
        state.parent.mkdir(exist_ok=True)
        state.write_text("half")
        Path(output.staged).mkdir()
        raise HalfDone(was_there)


class HalfDone(Exception):
    """Says whether a checkpoint was there."""


def test_what_an_attempt_has_left_is_there_for_the_next_of_the_same_run_only(
    tmp_path: Path,
) -> None:
    place = local(tmp_path / "out")

    def resumes(run: Run) -> bool:
        with pytest.raises(HalfDone) as caught:
            fail(place, run)
        assert not [name for name in os.listdir(tmp_path) if "staged" in name]
        return bool(caught.value.args[0])

    assert [resumes(run_of("a")) for _ in range(3)] == [False, True, True]
    assert not resumes(run_of("a", "another configuration"))
    assert not resumes(run_of("b"))
    assert resumes(run_of("b"))
    attempt(place, run_of("b"))
    assert os.listdir(tmp_path) == ["out"]


def test_another_configuration_under_the_same_id_is_refused(tmp_path: Path) -> None:
    attempt(local(tmp_path / "out"), run_of("a"))
    with pytest.raises(ConfigError, match=r"run_id 'a' was completed .* another configuration"):
        attempt(local(tmp_path / "out"), run_of("a", "another"))


def test_what_no_job_of_the_kind_has_made_is_never_replaced(tmp_path: Path) -> None:
    (precious := tmp_path / "out").mkdir()
    attempt(local(precious), run_of(None))  # an empty directory is no loss
    with pytest.raises(ConfigError, match="was written by a 'train' job"):
        attempt(local(precious), run_of(None, job="predict"))
    (precious / MARKER).unlink()
    with pytest.raises(ConfigError, match="was not written by a job"):
        attempt(local(precious), run_of("a"))
    assert (precious / "module.json").exists()
    (precious / MARKER).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="was not written by a job"):
        attempt(local(precious), run_of("a"))


def test_a_refused_job_leaves_nothing_beside_what_it_did_not_replace(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "part-0.parquet").write_text("rows")
    for run_id in ("a", None):
        with pytest.raises(ConfigError, match="was not written by a job"):
            attempt(local(tmp_path / "table"), run_of(run_id))
    assert os.listdir(tmp_path) == ["table"]


def test_a_staged_directory_that_is_not_whole_is_not_published(tmp_path: Path) -> None:
    attempt(local(tmp_path / "out"), run_of("a"))
    damaged = tmp_path / "out.sparkdl-staged-0123abcd"
    (tmp_path / "out").rename(damaged)
    (damaged / "part-1").write_text("short")
    assert attempt(local(tmp_path / "out"), run_of("a"))[1]
    assert found(LocalFiles(), str(tmp_path / "out")) == "a"
    assert os.listdir(tmp_path) == ["out"]


def test_a_second_attempt_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    place = local(tmp_path / "out")
    first = Output(place, run_of("a"))
    refused = pytest.raises(InUseError, match=r"is being written by process \d+ \(airflow-1\)")
    with first.claimed("airflow-1"):
        with refused:
            attempt(place, run_of("a"))
        Path(first.staged).mkdir()
        first.commit({})
    assert not attempt(place, run_of("a"))[1]


def test_an_attempt_that_lost_its_lease_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for long, and another has made the output meanwhile."""
    monkeypatch.setattr(lease, "RENEWED_EVERY_S", 3600.0)
    store = ObjectStore()
    late = Output(stored(store), run_of("a"))
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: None)
    said = {"id": "other", "host": "h", "boot": "b", "process": "1", "application": "x"}
    with late.claimed():
        other = json.dumps({**said, "since": "now", "renewals": "1"}).encode()
        store.objects["bucket/out.sparkdl-job/in-use.json"] = other
        store.objects[f"{late.staged}/module.json"] = b"1"
        with pytest.raises(CheckpointError, match="did not renew its lease"):
            late.commit({})
    assert not any(name.startswith("bucket/out/") for name in store.objects)


def attempt_killed(place: Location, run: Run, moment: int) -> bool:
    """Attempt it in a process that kills itself at its ``moment``-th call, if it makes as many."""
    child = os.fork()
    if not child:
        gc.disable()  # what it closes holds locks, which this process would keep after its child
        calls = itertools.count()

        def count(frame: FrameType, event: str, argument: object) -> None:
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            attempt(place, run)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.nightly_variants
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_it_leaves_one_right_output(memory: Path, seed: int) -> None:
    """Counted in calls, for the clock of a slow machine says nothing of how far one is."""
    generator = random.Random(seed)
    place = local(memory / "out")
    calls = 1
    while attempt_killed(place, run_of("0"), calls):
        calls *= 2
    last = 0
    for number in range(1, 21):
        attempt_killed(place, run_of(str(number)), generator.randrange(calls))
        there = found(place.files, place.path)
        if there is not None:
            assert last <= int(there) <= number
            last = int(there)
    attempt(place, run_of("21"))
    assert found(place.files, place.path) == "21"
    assert os.listdir(memory) == ["out"]


@every("run_id", ["a", None])
def test_a_file_that_the_job_misses_is_told_as_it_is(tmp_path: Path, run_id: str | None) -> None:
    output = Output(local(tmp_path / "out"), run_of(run_id))
    with pytest.raises(FileNotFoundError, match=r"^its input$"), output.claimed():
        raise FileNotFoundError("its input")
    assert os.listdir(tmp_path) == ([] if run_id is None else ["out.sparkdl-job"])


def test_a_marker_that_names_files_outside_moves_none_of_them() -> None:
    store = ObjectStore()
    attempt(stored(store), run_of("a"))
    store.objects["bucket/theirs"] = b"kept"
    said = {"job": "train", "run_id": "b", "configuration_sha256": "c"}
    marker = json.dumps({**said, "files": {"../theirs": None}}).encode()
    store.objects[f"bucket/out.sparkdl-staged-0/{MARKER}"] = marker
    assert attempt(stored(store), run_of("b"))[1]
    assert store.objects["bucket/theirs"] == b"kept"
