"""An output belongs to one job, and a chunk is done only if its whole marker says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from every_row import every, every_row

from sparkdl.errors import ConfigError, DataError
from sparkdl.volumes.records import Marker, Records, digest_of

JOB: dict[str, Any] = {"model": "UNet 0f", "patch": [8, 8], "chunk": None}
PLANNED = {**JOB, "chunk": [16, 16]}
MARKER = Marker(7, "0f")


def marked(path: Path, *numbers: int) -> Records:
    records = Records(path)
    records.claim(JOB)
    records.note(PLANNED)
    (path / "zarr.json").write_text("{}")
    for number in numbers:
        records.mark(number, MARKER, digest_of(PLANNED))
    return records


def test_a_job_is_known_again_with_the_chunk_that_it_was_begun_with(tmp_path: Path) -> None:
    assert Records(tmp_path / "out").claim(JOB) == JOB
    assert not (tmp_path / "out").exists()
    Records(tmp_path / "out").note({**PLANNED, "chunk": [8, 8]})
    assert Records(tmp_path / "out").claim(JOB) == JOB  # the driver died before it made the array
    marked(tmp_path / "out")
    assert Records(tmp_path / "out").claim(JOB) == PLANNED
    assert Records(tmp_path / "out").claim(PLANNED) == PLANNED


@every_row(
    *((name, "{}") for name in (".zarray", "zarr.json", "info", "attributes.json", ".zgroup")),
    *((".zarray", place) for place in ("file://{}", "file://{}/", "file://{}|zarr2:")),
    (".zarray", {"driver": "auto", "kvstore": "file://{}"}),
    (".zarray", {"driver": "zarr", "kvstore": {"driver": "file", "path": "{}"}}),
    ("own", {"driver": "zarr", "kvstore": "file://{}", "metadata_key": "own"}),
)
def test_an_array_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, name: str, place: Any
) -> None:
    (tmp_path / name).write_text("{}")
    place = json.loads(json.dumps(place).replace("{}", str(tmp_path)))
    with pytest.raises(ConfigError, match="transform_volume has not made it"):
        Records(place).claim(JOB)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@every_row(
    *(("holiday/1.jpg", place, True) for place in ("{}", "file://{}", "file://{}|zarr3:")),
    ("c/0/0", {"driver": "zarr3", "kvstore": "file://{}"}, True),
    (".DS_Store", "{}", False),
    (".sparkdl/chunks/3", "{}", False),
)
def test_a_place_that_holds_other_things_is_refused_and_left_alone(
    tmp_path: Path, name: str, place: Any, refused: bool
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("precious")
    place = json.loads(json.dumps(place).replace("{}", str(tmp_path)))
    if not refused:
        assert Records(place).claim(JOB) == JOB
        return
    with pytest.raises(ConfigError, match=f"holds other things, such as {name}, among which"):
        Records(place).claim(JOB)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


@every("left", ["c/0/0/0/0", "0.0"])
def test_blocks_of_ours_whose_array_has_been_deleted_are_no_other_things(
    tmp_path: Path, left: str
) -> None:
    marked(tmp_path)
    (tmp_path / "zarr.json").unlink()
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("")
    assert Records(tmp_path).claim(JOB) == JOB


@every("place", ["{}", "file://{}"])
def test_what_was_marked_of_an_array_that_has_been_deleted_is_forgotten(
    tmp_path: Path, place: str
) -> None:
    marked(tmp_path, 0, 5)
    records = Records(place.format(tmp_path))
    assert records.claim(PLANNED) == PLANNED
    assert records.done(PLANNED) == {0: MARKER, 5: MARKER}
    (tmp_path / "zarr.json").unlink()
    another = {**JOB, "model": "UNet 1e"}
    assert records.claim(another) == another
    records.note(another)
    assert records.done(PLANNED) == {}


def test_a_torn_marker_never_counts(tmp_path: Path) -> None:
    """Cut at every length, empty, or with anything else in it."""
    records = marked(tmp_path / "out", 3)
    marker = tmp_path / "out/.sparkdl/chunks/3"
    whole = marker.read_bytes()
    for length in range(len(whole)):
        marker.write_bytes(whole[:length])
        assert records.done(PLANNED) == {}, length
    for octets in (b"\x00" * len(whole), b"\xff", b"[]", b"7", b"null", whole[::-1]):
        marker.write_bytes(octets)
        assert records.done(PLANNED) == {}, octets
    marker.write_bytes(whole)
    assert records.done(PLANNED) == {3: MARKER}


def test_a_marker_of_another_chunk_or_under_another_name_never_counts(tmp_path: Path) -> None:
    records = marked(tmp_path / "out", 3)
    folder = tmp_path / "out/.sparkdl/chunks"
    whole = (folder / "3").read_bytes()
    (folder / "4").write_bytes(whole)
    (folder / "five").write_bytes(whole)
    (folder / "3.part").write_bytes(whole)
    assert records.done(PLANNED) == {3: MARKER}


def test_a_damaged_record_is_an_error_in_words(tmp_path: Path) -> None:
    marked(tmp_path / "out")
    for octets in (
        *(b"{", b"", b"[]", b"7", b"null", b'"x"', b"\xff", b"[" * 100_000, b"{}"),
        *(b'{"chunk": %s}' % chunk for chunk in (b"null", b"7", b'"ab"', b"[8]", b"[8, null]")),
    ):
        (tmp_path / "out/.sparkdl/job.json").write_bytes(octets)
        with pytest.raises(DataError, match="damaged record"):
            Records(tmp_path / "out").claim(JOB)


def test_a_place_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = Records(tmp_path / "file/out")
    with pytest.raises(DataError, match="cannot be written"):
        records.note(PLANNED)
    with pytest.raises(DataError, match=r"cannot be (written|read)"):
        records.claim(JOB)
