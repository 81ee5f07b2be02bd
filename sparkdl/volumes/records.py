"""What an output is the output of, and which of its chunks are done; both are beside its blocks.

    .sparkdl/job.json          the model, the input, the sizes: whatever decides what is written
    .sparkdl/chunks/<number>   a chunk is done; written once its blocks are durable

tensorstore writes an object whole or not at all; whatever else stands there counts as nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from sparkdl.errors import ConfigError, DataError
from sparkdl.volumes.store import OPENING_S, Place, said, shown, specification, tensorstore

Job = Mapping[str, Any]
"""JSON: what decides the output, by the argument or thing that it comes from."""

FOLDER = ".sparkdl/"
METADATA = (".zarray", ".zgroup", "zarr.json", "attributes.json", "info")
"""What says that there is an array, or a group of arrays."""
READ_AT_ONCE = 1000
"""Markers that are read at a time."""


class Records:
    """The records of one output.

    Args:
        place: the output, which need not exist.
    """

    def __init__(self, place: Place) -> None:
        self._place, library = place, tensorstore()
        with said("opened", place):
            spec = specification(place)
            store = library.Spec(spec).kvstore
            if store.path and not store.path.endswith("/"):  # a URL, whose format is not known yet
                store.path += "/"
            self._root = library.KvStore.open(store).result(timeout=OPENING_S)
        self._folder = self._root / FOLDER
        self._metadata = (*METADATA, spec.get("metadata_key", METADATA[0]))

    def claim(self, job: Job) -> Job:
        """Find out whether the output may be of a job, before anything is written.

        What is marked of an array that has been deleted since is forgotten.

        Args:
            job: with a ``chunk`` of None if any will do.

        Returns:
            The job, with the chunk that it was begun with, if it was.

        Raises:
            ConfigError: the output is of another job, or of something else.
            DataError: the store cannot be read or written.
        """
        with said("read", self._place):
            found = self._folder.read("job.json").result(timeout=OPENING_S)
            there = [name for name in self._metadata if self._has(name)]
        if not there:
            if found.state != "value":
                self._require_no_others()
            self.forget()
            return job
        if found.state != "value":
            raise ConfigError(
                f"{shown(self._place)} is there already ({there[0]}), and transform_volume has "
                "not made it. Choose another place for the output, or delete it first"
            )
        known = _parsed(found.value)
        if not _is_job(known, len(job["patch"])):
            raise DataError(
                f"{shown(self._place)} has a damaged record, {FOLDER}job.json. Delete the output, "
                f"with {FOLDER}, to begin again"
            )
        given = {**job, "chunk": job["chunk"] or known["chunk"]}
        differing = [
            f"{name} was {known.get(name)}, is {given.get(name)}"
            for name in sorted({*known, *given})
            if known.get(name) != given.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{shown(self._place)} was begun with something else: {'; '.join(differing)}. "
                "Give the same to finish it, or choose another place, or delete it first"
            )
        return known

    def note(self, job: Job) -> None:
        """Write what the output is to be of."""
        with said("written", self._place):
            text = json.dumps(job, indent=1, sort_keys=True)
            self._folder.write("job.json", text.encode()).result(timeout=OPENING_S)

    def forget(self) -> None:
        """Forget which chunks are done."""
        with said("written", self._place):
            markers = tensorstore().KvStore.KeyRange("chunks/", "chunks0")
            self._folder.delete_range(markers).result()

    def done(self, job: Job) -> dict[int, int]:
        """The patches that were computed for each chunk that is done, by its number."""
        digest, found = digest_of(job), {}
        with said("read", self._place):
            names = self._folder.list().result()
            marked = [name for name in map(bytes.decode, names) if name.startswith("chunks/")]
            for start in range(0, len(marked), READ_AT_ONCE):
                some = marked[start : start + READ_AT_ONCE]
                reads = [self._folder.read(name) for name in some]
                for name, read in zip(some, reads, strict=True):
                    patches = _patches(read.result().value, digest, name)
                    if patches is not None:
                        found[int(name.removeprefix("chunks/"))] = patches
        return found

    def mark(self, number: int, patches: int, digest: str) -> None:
        """Note that a chunk is done, and durable.

        Args:
            number: of the chunk.
            patches: that went through the network for it.
            digest: of the job.
        """
        with said("written", self._place):
            name = f"chunks/{number}"
            text = json.dumps([digest, name, patches])
            self._folder.write(name, text.encode()).result(timeout=OPENING_S)

    def _require_no_others(self) -> None:
        """Check that nothing of others lies where nothing of ours does.

        Hidden files may: file managers leave them behind.

        Raises:
            ConfigError: something does.
        """
        with said("read", self._place):
            names = map(bytes.decode, self._root.list().result(timeout=OPENING_S))
            other = min((name for name in names if not name.startswith(".")), default=None)
        if other is not None:
            raise ConfigError(
                f"{shown(self._place)} holds other things, such as {other}, among which an array "
                "would be hard to tell apart and to delete. Choose a place for the output where "
                "nothing is yet"
            )

    def _has(self, name: str) -> bool:
        found = self._root.read(name).result(timeout=OPENING_S)
        return bool(found.state == "value")


def digest_of(job: Job) -> str:
    """A digest of a job, with its chunk."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _parsed(text: bytes) -> Any:
    """What JSON tells; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_job(known: Any, axes: int) -> TypeGuard[Job]:
    match known:
        case {"chunk": [*sizes]}:
            return len(sizes) == axes and all(isinstance(n, int) and n > 0 for n in sizes)
    return False


def _patches(text: bytes, digest: str, name: str) -> int | None:
    """The patches that a marker tells; None if it is not whole, or of another job."""
    match _parsed(text):
        case [str() as job, str() as chunk, int() as patches] if (job, chunk) == (digest, name):
            return patches
    return None
