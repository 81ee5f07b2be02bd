"""The list of a directory's files with their sizes and checksums, which makes the directory exist.

It is written last, by ``publishing.put_file``. Whoever reads it compares every byte with it.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from typing import Any, BinaryIO

from sparkdl.durable.local_files import Files, exists
from sparkdl.durable.publishing import BLOCK_BYTES
from sparkdl.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the files' format; a reader refuses a newer one."""
MAX_MANIFEST_BYTES = 256 << 20
"""Enough for a hundred thousand workers and a million epochs; more is neither written nor read."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Manifest = dict[str, Any]
"""``format``, ``files`` (an entry by name) and ``description``."""


class UnfinishedError(Exception):
    """There is no manifest."""


class DamagedError(Exception):
    """Some byte differs from what was written."""


class Checksummed:
    """Passes on what is written, and computes its size and checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._bytes = 0
        self._sha256 = hashlib.sha256()

    def write(self, octets: bytes | memoryview) -> int:
        """Write to the file."""
        self._stream.write(octets)
        self._sha256.update(octets)
        self._bytes += len(octets)
        return len(octets)

    @property
    def entry(self) -> dict[str, Any]:
        """What a manifest says of the file."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


def manifest_text(path: str, files: dict[str, Any], description: dict[str, Any]) -> bytes:
    """The contents of a manifest.

    Raises:
        CheckpointError: it would be larger than any reader takes.
    """
    manifest = {"format": FORMAT, "files": files, "description": description}
    text = json.dumps({"sha256": _digest(manifest), "manifest": manifest}, indent=1).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{path} would have {len(text)} bytes, over the limit of {MAX_MANIFEST_BYTES}: it "
            "holds the values of all metrics in every epoch. Let metrics return fewer numbers"
        )
    return text


def verified_manifest(files: Files, directory: str) -> Manifest:
    """The manifest of a directory whose every byte is as it says.

    Raises:
        UnfinishedError: there is none.
        DamagedError: a file, or the manifest itself, is not what was written.
        CheckpointError: a newer version wrote it.
    """
    manifest = _read(files, posixpath.join(directory, MANIFEST))
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{directory} has format {manifest['format']}, newer than the {FORMAT} that this "
            "version of sparkdl-torch reads. Upgrade it"
        )
    for name, entry in manifest["files"].items():
        count, sha256 = 0, hashlib.sha256()
        with files.open_input_stream(posixpath.join(directory, name)) as stream:
            while count <= entry["bytes"] and (block := stream.read(BLOCK_BYTES)):
                sha256.update(block)
                count += len(block)
        if count != entry["bytes"]:
            found = f"{count} bytes" if count < entry["bytes"] else "more"
            raise DamagedError(
                f"{name} had {entry['bytes']} bytes when it was written and has {found}"
            )
        if sha256.hexdigest() != entry["sha256"]:
            raise DamagedError(f"{name} has a different checksum from when it was written")
    return manifest


def _read(files: Files, path: str) -> Manifest:
    if not exists(files, path):
        raise UnfinishedError
    with files.open_input_stream(path) as stream:
        octets = stream.read(MAX_MANIFEST_BYTES + 1)
    if len(octets) > MAX_MANIFEST_BYTES:
        raise DamagedError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        outer = json.loads(octets)
        manifest: Manifest = outer["manifest"]
        intact = outer["sha256"] == _digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is not readable: {error!r}") from error
    if not intact:
        raise DamagedError(f"{MANIFEST} has a different checksum from when it was written")
    match manifest:
        case {"format": int(newest), "files": dict(entries), "description": dict()}:
            if newest > FORMAT or all(map(_is_entry, entries.items())):
                return manifest
    raise DamagedError(f"{MANIFEST} does not have the fields of a manifest")


def _is_entry(item: tuple[str, Any]) -> bool:
    """Whether a file's entry is complete, and its file is beside the manifest."""
    match item:
        case (str(name), {"bytes": int(count), "sha256": str(sha256)}):
            named = _FILE_NAME.fullmatch(name) and not name.startswith(MANIFEST)
            return bool(named and count >= 0 and _SHA256.fullmatch(sha256))
    return False


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
