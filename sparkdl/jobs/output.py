"""A job's output: all of it or nothing, and made once per run, however often that starts.

    <output>/                          the files, and _result.json, without which it is not complete
    <output>.sparkdl-staged-<letters>/ what one attempt writes; once it has a _result.json of its
                                       own the run is decided, and whoever comes next publishes it
    <output>.sparkdl-replaced/         between two renames: what the output was before
    <output>.sparkdl-job/              while a run is at work, or was interrupted
        in-use.json                    the lease: of two attempts at once, one is refused
        run.json                       whose the rest is
        moving.json                    while files are moved to the output, which is lost by then
        checkpoints/                   of the training

    claim      hold the lease; publish or clear what an attempt that was killed has left
    stage      the job writes to the staged directory
    decide     synchronize it, and put its _result.json, which lists every file
    publish    output -> replaced, staged -> output, delete replaced; or, where directories cannot
               be renamed at once (object stores): delete the old files, the marker first, move the
               new ones, put the marker last
    clear      delete what is next to the output

Each step may be interrupted anywhere and repeated. Nothing here knows about Spark.
"""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from sparkdl.durable.lease import Lease, belongs_to_lease, held
from sparkdl.durable.local_files import (
    ASIDE,
    Files,
    LocalFiles,
    delete,
    exists,
    put_file,
    replace_directory,
    synchronize,
)
from sparkdl.errors import CheckpointError, ConfigError, InUseError

logger = logging.getLogger(__name__)

MARKER = "_result.json"
"""Spark's readers skip names that start with these."""
STAGED = ".sparkdl-staged-"
WORK = ".sparkdl-job"
RUN = "run.json"
MOVING = "moving.json"
CHECKPOINTS = "checkpoints"
MAX_MARKER_BYTES = 64 << 20
"""Enough for the names of half a million files; larger markers are not read."""
_ATTEMPTS = 3

_STORAGE_ERRORS = (OSError, pa.ArrowException)

Result = dict[str, Any]
"""What ``_result.json`` says; see docs/jobs.md."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where an output is.

    Attributes:
        files: its file system.
        path: the directory in it, without a slash at its end.
        renames: whether the file system renames a directory atomically, rather than copying it.
    """

    files: Files
    path: str
    renames: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that an output belongs to.

    Attributes:
        job: ``train``, ``evaluate`` or ``predict``.
        run_id: the same in all attempts of the same run; None for a run of its own.
        configuration_sha256: a digest of all that decides the result.
    """

    job: str
    run_id: str | None
    configuration_sha256: str


class Output:
    """One attempt to make an output.

    Args:
        location: where it is.
        run: the run that it belongs to.

    Attributes:
        staged: the directory to which the job writes; it does not exist yet.
        checkpoints: a directory for what an attempt leaves to the next one of the same run; None if
            there can be none, since the run has no id.
    """

    def __init__(self, location: Location, run: Run) -> None:
        self._files = location.files
        self._path = location.path
        self._renames = location.renames
        self._run = run
        self._work = location.path + WORK
        self._lease: Lease | None = None
        self.staged = f"{location.path}{STAGED}{secrets.token_hex(8)}"
        self.checkpoints = None if run.run_id is None else f"{self._work}/{CHECKPOINTS}"

    @contextlib.contextmanager
    def claimed(self, application: str | None = None) -> Iterator[Result | None]:
        """Be the only one to make it, inside a ``with`` block.

        Args:
            application: what this process belongs to, for others that are refused meanwhile.

        Yields:
            The run's result if its output is complete; None if it must be made and committed.

        Raises:
            InUseError: another process is making it; the message says which.
            ConfigError: what is there is not an earlier output of this job, or is this run's with
                another configuration.
            CheckpointError: the file system refuses.
        """
        failed: BaseException | None = None
        try:
            done = self._completed()
            if done is not None and not self._leftovers():
                yield done
                return
            with self._leased(application) as lease:
                self._lease = lease
                done = self._recovered()
                try:
                    yield done
                except BaseException as error:
                    failed = error
                self._clear(failed=failed is not None)
            self._remove_work()
        except ConfigError:  # it stays as it is, without anything beside it
            self._remove_work()
            raise
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{self._path} could not be written: {error}") from error
        if failed is not None:  # not in the try, lest a file that the job lacks be taken for ours
            raise failed

    def commit(self, result: Result) -> Result:
        """Make what was staged the output, which is durable when this returns.

        Args:
            result: what to say about it; JSON.

        Returns:
            The result, plus what identifies the run, and every file with its size.

        Raises:
            CheckpointError: the file system refuses, or another process works there now.
        """
        assert self._lease is not None
        try:
            self._files.create_dir(self.staged, recursive=True)
            listed = dict(sorted(self._walk(self.staged)))
            whole = {"format": 1, **asdict(self._run), **result, "files": listed}
            above = {str(each) for name in listed for each in PurePosixPath(name).parents} | {"."}
            for name in [*listed, *sorted(above, key=len, reverse=True)]:
                synchronize(self._files, str(PurePosixPath(self.staged, name)))
            self._lease.check()
            self._put(self.staged, MARKER, whole)
            synchronize(self._files, posixpath.dirname(self.staged))
            self._publish(self.staged, whole)
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{self._path} could not be written: {error}") from error
        return whole

    def _recovered(self) -> Result | None:
        """Finish or clear what an earlier attempt left; the result if the run is complete."""
        files, aside = self._files, self._path + ASIDE
        decided = {path: found for path in self._staged() if (found := self._decided(path))}
        mine = [path for path, found in decided.items() if self._is_this_run(found)]
        if mine and self._completed() is None:
            if not self._is_moving():  # somebody may have put something else there meanwhile
                self._require_replaceable()
            self._publish(mine[0], decided[mine[0]])
        elif exists(files, aside) and not exists(files, self._path):
            files.move(aside, self._path)
        elif decided and self._is_moving() and self._result_at(self._path) is None:
            delete(files, self._path)  # another run was killed while it moved its files there
        for path in self._staged():
            self._discard(path)
        if exists(files, self._path):
            delete(files, aside)
        done = self._completed()
        if done is None:
            self._require_replaceable()
            self._keep_work_of_this_run()
        return done

    def _completed(self) -> Result | None:
        """The existing result, if it is this run's.

        Raises:
            ConfigError: the run was completed with another configuration.
        """
        found = self._result_at(self._path)
        if found is None or not self._is_this_run(found, "job", "run_id"):
            return None
        if found.get("configuration_sha256") != self._run.configuration_sha256:
            raise ConfigError(
                f"run_id '{self._run.run_id}' was completed in {self._path} with another "
                "configuration. Use a different run_id, or delete that output"
            )
        return found

    def _is_this_run(self, found: Result, *keys: str) -> bool:
        """Whether a result is this run's, by all that identifies it or by some of it."""
        mine = asdict(self._run)
        return mine["run_id"] is not None and all(found.get(k) == mine[k] for k in keys or mine)

    def _require_replaceable(self) -> None:
        """Refuse to replace what no job of this kind has made."""
        if not exists(self._files, self._path):
            return
        found = self._result_at(self._path)
        if found is None:
            if self._files.get_file_info(self._path).type == fs.FileType.Directory and not any(
                self._walk(self._path)
            ):
                return
            raise ConfigError(
                f"{self._path} already exists and was not written by a job (it has no "
                f"{MARKER}). Choose another path, or delete it"
            )
        if found.get("job") != self._run.job:
            raise ConfigError(
                f"{self._path} was written by a '{found.get('job')}' job, and this is a "
                f"'{self._run.job}' job. Choose another path"
            )

    def _publish(self, staged: str, result: Result) -> None:
        """Put a decided directory in the output's place; may be repeated if interrupted."""
        if self._lease is not None:
            self._lease.check()
        if self._renames:
            replace_directory(self._files, staged, self._path)
        else:
            self._move_files(staged, result)

    def _is_moving(self) -> bool:
        """Whether an attempt has begun to move files to the output, and not ended."""
        return exists(self._files, posixpath.join(self._work, MOVING))

    def _move_files(self, staged: str, result: Result) -> None:
        self._put(self._work, MOVING, {"staged": staged})
        marker = posixpath.join(self._path, MARKER)
        if exists(self._files, marker):
            self._files.delete_file(marker)
        wanted: dict[str, int] = result["files"]
        for name, _ in list(self._walk(self._path)):
            if name not in wanted:
                self._files.delete_file(posixpath.join(self._path, name))
        for name in wanted:
            source, target = posixpath.join(staged, name), posixpath.join(self._path, name)
            if not exists(self._files, source):
                continue  # moved before an interruption
            if exists(self._files, target):
                self._files.delete_file(target)
            self._files.create_dir(posixpath.dirname(target), recursive=True)
            self._files.move(source, target)
        self._put(self._path, MARKER, result)
        self._discard(staged)

    def _decided(self, staged: str) -> Result | None:
        """The result of a staged directory that is complete."""
        found = self._result_at(staged)
        if found is None:
            return None
        there = dict(self._walk(staged))
        if not self._renames:
            there = {**dict(self._walk(self._path)), **there}
        missing = [name for name, size in found["files"].items() if there.get(name, -1) != size]
        if missing:
            logger.warning("%s is incomplete (%s is missing): deleting it", staged, missing[0])
            return None
        return found

    @contextlib.contextmanager
    def _leased(self, application: str | None) -> Iterator[Lease]:
        with contextlib.ExitStack() as stack:
            for attempt in range(_ATTEMPTS):
                self._files.create_dir(self._work, recursive=True)
                try:
                    lease = stack.enter_context(held(self._files, self._work, application))
                    break
                except FileNotFoundError:  # its last holder has ended and deleted it
                    if attempt == _ATTEMPTS - 1:
                        raise
                except InUseError as error:
                    raise InUseError(
                        f"{self._path} is being written by {error.holder}. Wait for it to end: "
                        "the next attempt with the same run_id then finds the output complete",
                        error.holder,
                    ) from None
            yield lease

    def _keep_work_of_this_run(self) -> None:
        found = self._read(posixpath.join(self._work, RUN))
        if found is not None and self._is_this_run(found):
            return
        if found is not None:
            logger.warning(
                "%s was left by another run, or by this one with a different configuration: "
                "deleting it",
                self._work,
            )
        self._clear_work()
        self._put(self._work, RUN, asdict(self._run))

    def _clear(self, *, failed: bool) -> None:
        """Delete what is no longer needed; failing at that does not fail the job."""
        try:
            self._discard(self.staged, unless_decided=True)
            if not failed or (self._run.run_id is None and not self._is_moving()):
                self._clear_work()
        except _STORAGE_ERRORS as error:
            logger.warning("leftovers beside %s could not be deleted: %s", self._path, error)

    def _clear_work(self) -> None:
        """Delete all but the lease."""
        if exists(self._files, self._work):
            for info in self._list(self._work):
                if not belongs_to_lease(info.base_name):
                    delete(self._files, posixpath.join(self._work, info.base_name))

    def _remove_work(self) -> None:
        """Delete the directory if it is empty; the lease has been released."""
        if isinstance(self._files, LocalFiles):
            with contextlib.suppress(OSError):  # not empty: to be resumed, or in use again
                self._files.delete_empty_dir(self._work)
        elif exists(self._files, self._work) and not self._list(self._work):
            self._files.delete_dir(self._work)

    def _leftovers(self) -> bool:
        beside = (self._work, self._path + ASIDE)
        return any(exists(self._files, path) for path in beside) or bool(self._staged())

    def _staged(self) -> list[str]:
        parent, name = posixpath.split(self._path)
        return sorted(
            posixpath.join(parent, info.base_name)
            for info in self._list(parent)
            if info.base_name.startswith(name + STAGED)
        )

    def _discard(self, staged: str, *, unless_decided: bool = False) -> None:
        """Delete a staged directory, its marker first, lest a part of it be taken for the whole."""
        marker = posixpath.join(staged, MARKER)
        if exists(self._files, marker):
            if unless_decided:
                return
            self._files.delete_file(marker)
            synchronize(self._files, staged)
        delete(self._files, staged)

    def _list(self, directory: str) -> list[fs.FileInfo]:
        found = self._files.get_file_info(fs.FileSelector(directory, allow_not_found=True))
        return list(found)

    def _walk(self, directory: str, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Name and bytes of every file in a directory and below, except the marker."""
        for info in self._list(f"{directory}/{prefix}".rstrip("/")):
            name = prefix + info.base_name
            if info.type == fs.FileType.Directory:
                yield from self._walk(directory, f"{name}/")
            elif name not in (MARKER, f"{MARKER}.partial"):
                yield name, -1 if info.size is None else int(info.size)

    def _result_at(self, directory: str) -> Result | None:
        """What a marker says; None if there is none, or it cannot be read."""
        found = self._read(posixpath.join(directory, MARKER))
        return found if found is not None and isinstance(found.get("files"), dict) else None

    def _read(self, path: str) -> Result | None:
        if self._files.get_file_info(path).type != fs.FileType.File:
            return None
        with self._files.open_input_stream(path) as stream:
            data = stream.read(MAX_MARKER_BYTES)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _put(self, directory: str, name: str, said: Result) -> None:
        """Write a small file, all of it or nothing."""
        data = json.dumps(said, indent=1, allow_nan=False).encode()
        put_file(self._files, posixpath.join(directory, name), lambda file: file.write(data))
