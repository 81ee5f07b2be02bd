"""A worker reads and writes through the driver what it cannot open itself, and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.spark.storage import files
from sparkdl.spark.storage.files import DriverFiles, open_through

URI = "nobodys://store/run"


class Wire:
    """A driver whose store is a directory, asked by headers that have been JSON."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.files = DriverFiles(lambda uri: (fs.LocalFileSystem(), str(root)))
        self.longest = 0

    def __call__(self, asked: dict[str, Any]) -> Any:
        header = json.dumps(asked)
        answer = json.dumps(self.files.answer(json.loads(header)))
        self.longest = max(self.longest, len(header), len(answer))
        found = json.loads(answer)
        if "refused" in found:
            raise OSError(found["refused"])
        return found["done"]


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "root")


def test_checkpoints_are_published_found_and_deleted_through_the_driver(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    store = CheckpointStore(URI, keep_last=2, open_elsewhere=open_through(wire))
    contents = [bytes([number]) * 12_345 for number in range(4)]
    for content in contents:
        pending = store.begin()
        with pending.create("state") as file:
            file.write(memoryview(content))
        pending.publish({"length": len(content)})
    store.prune()
    there = sorted(path.name for path in wire.root.iterdir())
    assert there == ["checkpoint-000003", "checkpoint-000004"]
    saved = CheckpointStore(URI, keep_last=2, open_elsewhere=open_through(wire)).newest()
    assert saved is not None
    with saved.open("state") as file:
        assert file.read() == contents[-1]
    assert wire.longest < 2_000
    assert wire.files._streams == {}


def test_what_the_driver_cannot_do_is_an_error_in_its_words(wire: Wire) -> None:
    files, root = open_through(wire)(URI)
    assert files.get_file_info(f"{root}/nothing").type == fs.FileType.NotFound
    with pytest.raises(OSError, match="nothing"):
        files.open_input_stream(f"{root}/nothing")
    store = CheckpointStore(URI, keep_last=1, open_elsewhere=open_through(wire))
    wire.root.rename(wire.root.parent / "away")
    wire.root.touch()
    with pytest.raises(CheckpointError, match="cannot be created"):
        store.begin()


def test_the_drivers_own_disk_is_refused(wire: Wire) -> None:
    for uri in ("file:///tmp/x", "FILE:/tmp/x", "/tmp/x", "", "x"):
        with pytest.raises(OSError, match="on the driver's own disk"):
            open_through(wire)(uri)


def test_a_uri_that_nobody_can_open_is_named() -> None:
    def refuse(uri: str) -> Any:
        raise OSError(f"No FileSystem for scheme {uri}")

    def ask(asked: dict[str, Any]) -> Any:
        raise OSError(DriverFiles(refuse).answer(asked)["refused"])

    with pytest.raises(ConfigError, match="No FileSystem for scheme nobodys"):
        CheckpointStore(URI, keep_last=1, open_elsewhere=open_through(ask))


NEVER_ASKED: list[Any] = [
    None,
    3,
    {},
    {"do": "open"},
    {"do": "open", "uri": 3},
    {"do": "info", "uri": "another://", "paths": []},
    {"do": "info", "uri": URI, "paths": 3},
    {"do": "info", "uri": URI, "paths": ["/etc/passwd"]},
    {"do": "read", "uri": URI, "paths": ["ROOT/../secret"]},
    {"do": "read", "uri": URI, "paths": ["ROOTless/secret"]},
    {"do": "read", "uri": URI, "paths": [None]},
    {"do": "read", "uri": URI, "paths": []},
    {"do": "list", "uri": URI, "paths": ["ROOT"]},
    {"do": "move", "uri": URI, "paths": ["ROOT/a", "/tmp/b"]},
    {"do": "__class__", "uri": URI, "paths": []},
    {"do": "delete_root_dir_contents", "uri": URI, "paths": []},
    {"do": "next", "stream": 7},
    {"do": "put", "stream": [], "octets": ""},
    {"do": "close", "stream": None},
]


def test_what_no_worker_asks_for_is_an_error_and_reaches_nothing(wire: Wire) -> None:
    (wire.root.parent / "secret").write_text("secret")
    _, root = open_through(wire)(URI)
    answered = []
    for asked in NEVER_ASKED:
        if isinstance(asked, dict) and isinstance(asked.get("paths"), list):
            paths = [path.replace("ROOT", root) if path else path for path in asked["paths"]]
            asked = {**asked, "paths": paths}
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            answered.append((asked, wire.files.answer(asked)))
    assert answered == []


def test_what_a_lost_worker_has_left_open_is_closed(wire: Wire) -> None:
    files, root = open_through(wire)(URI)
    half = files.open_output_stream(f"{root}/half")
    (stream,) = wire.files._streams.values()
    wire.files.close()
    assert stream.closed
    assert not half.closed
    with pytest.raises(KeyError):
        half.close()
