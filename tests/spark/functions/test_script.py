"""A script runs as it was sent, whatever a worker's host has at its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.spark.functions.program import Script, run_script

TELLS = b"""
import sys
from pathlib import Path
Path(sys.argv[1]).write_text(f"{__name__} {sys.argv[2:]} {__file__} {sys.path[0]}")
"""


def told_by(script: Script, tmp_path: Path) -> list[str]:
    """Its name, arguments, file and directory, as it wrote them down."""
    out = tmp_path / "told"
    out.unlink(missing_ok=True)
    run_script(script, [str(out), "x"])
    return out.read_text().split(" ")


def test_a_script_that_is_there_as_it_was_sent_runs_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(TELLS)
    expected = ["__main__", "['x']", str(path), str(tmp_path)]
    assert told_by(Script(str(path), TELLS), tmp_path) == expected
    assert caplog.text == ""


def test_another_script_at_the_same_path_is_not_run_but_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("raise LookupError('not sent')")
    for there in (b"", TELLS.replace(b"x", b"y"), TELLS + b"\n", b"\xff" * 9):
        caplog.clear()
        path.write_bytes(there)
        name, arguments, file, folder = told_by(Script(str(path), TELLS), tmp_path)
        assert (name, arguments, Path(file).name) == ("__main__", "['x']", "train.py")
        assert Path(file).parent == Path(folder) != tmp_path
        assert not Path(folder).exists()
        assert f"{path} on " in caplog.text
        assert "differs from the driver's" in caplog.text


def test_a_script_that_is_not_there_runs_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").mkdir()
    for path in ("elsewhere/train.py", "train.py"):
        assert told_by(Script(str(tmp_path / path), TELLS), tmp_path)[0] == "__main__"
    assert caplog.text == ""


def test_a_script_keeps_its_own_encoding(tmp_path: Path) -> None:
    check = b"assert name == chr(233)\n"
    for heading, encoding in (("# coding: latin-1\n", "latin-1"), ("", "utf-8")):
        source = f"{heading}name = 'é'\n".encode(encoding)
        run_script(Script(str(tmp_path / "train.py"), source + check), [])


def test_a_script_in_a_directory_that_may_not_be_entered_runs_as_it_was_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert told_by(Script(str(tmp_path / "home" / "train.py"), TELLS), tmp_path)[0] == "__main__"
    assert "cannot be read" in caplog.text


def test_nothing_of_a_script_is_left_in_the_process(tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    with pytest.raises(SystemExit):
        run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.path.clear(); sys.exit(3)"), [])
    run_script(Script(str(tmp_path / "a.py"), b"import sys; sys.exit(0)"), [])
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
