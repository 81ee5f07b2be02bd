"""Modules are importable within the block, and nothing of them is felt before or after."""

from __future__ import annotations

import importlib
import io
import os
import stat
import sys
import zipfile
import zipimport
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from projects import on_path, write

from sparkdl.errors import SetupError
from sparkdl.spark.modules.arrival import Arrived, Shipment, arrive, importable
from sparkdl.user_code.needed_modules import advice


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Spark keeps its files on this host."""
    folder = tmp_path / "host"
    folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    return folder


def shipment(*names: str, base: str = "/nowhere", digest: str = "d1", **files: str) -> Shipment:
    """One as the driver makes it; the paths' dots are written as two underscores."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    broadcast: Any = SimpleNamespace(value=packed.getvalue())
    return Shipment(digest, tuple((name, base) for name in names), broadcast, ())


ONE = "own_one"


def state() -> tuple[list[str], list[Any], set[str]]:
    return list(sys.path), list(sys.meta_path), set(sys.modules)


def test_a_module_is_imported_anew_each_time_and_is_gone_after() -> None:
    arrived = arrive(shipment(ONE, **{"own_one.py": "import colorsys\nseen = []"}))
    importlib.import_module("colorsys")
    before = state()
    modules = []
    for _ in range(2):
        with importable(arrived):
            module = importlib.import_module("own_one")
            assert module.seen == []
            module.seen.append(1)
            modules.append(module)
        assert state() == before
    assert modules[0] is not modules[1]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("own_one")


def test_what_is_kept_is_the_same_module_in_the_next_block() -> None:
    arrived = arrive(shipment(ONE, **{"own_one.py": ""}))
    kept: dict[str, Any] = {}
    with importable(arrived, kept):
        module = importlib.import_module("own_one")
    assert kept == {"own_one": module}
    with importable(arrived, kept):
        assert importlib.import_module("own_one") is module
    assert "own_one" not in sys.modules


def test_what_has_the_same_name_here_waits_until_the_block_ends(project: Path) -> None:
    write(project, {"own_pack/__init__.py": "WHOSE = 'here'", "own_pack/x.py": ""})
    here = importlib.import_module("own_pack.x"), sys.modules["own_pack"]
    arrived = arrive(
        shipment(
            "own_pack",
            **{"own_pack/__init__.py": "WHOSE = 'sent'", "own_pack/y.py": ""},
        )
    )
    before = state()
    with importable(arrived):
        assert importlib.import_module("own_pack").WHOSE == "sent"
        importlib.import_module("own_pack.y")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("own_pack.x")
    assert state() == before
    assert (importlib.import_module("own_pack.x"), sys.modules["own_pack"]) == here


def test_folders_without_init_are_shared_with_what_is_here(project: Path) -> None:
    write(project, {"own_folder/here.py": "WHOSE = 'here'", "own_folder/both.py": "WHOSE = 'here'"})
    arrived = arrive(
        shipment(
            "own_folder.sent",
            "own_folder.both",
            "own_new.deep.net",
            **{
                "own_folder/sent.py": "WHOSE = 'sent'",
                "own_folder/both.py": "WHOSE = 'sent'",
                "own_new/deep/net.py": "from own_folder import both, here",
            },
        )
    )
    both = importlib.import_module("own_folder.both")
    before = state()
    for _ in range(2):
        with importable(arrived):
            net = importlib.import_module("own_new.deep.net")
            assert (net.both.WHOSE, net.here.WHOSE) == ("sent", "here")
            assert importlib.import_module("own_folder.sent").WHOSE == "sent"
        assert (state()[:2], sys.modules["own_folder"].both) == (before[:2], both)
        assert not hasattr(sys.modules["own_folder"], "sent")
        assert state()[2] - before[2] == {"own_folder.here"}


def test_files_that_are_here_as_on_the_driver_are_imported_from_there(
    host: Path, project: Path
) -> None:
    text = "from pathlib import Path\nTOLD = (Path(__file__).parent / 'large.bin').read_text()"
    write(project, {"own_pack/__init__.py": text, "own_pack/large.bin": "large"})
    sent = shipment("own_pack", base=str(project), **{"own_pack/__init__.py": text})
    with importable(arrive(sent)):
        assert importlib.import_module("own_pack").TOLD == "large"
    write(project, {"own_pack/__init__.py": "TOLD = 'edited since'"}, when=1)
    with importable(arrive(sent)), pytest.raises(FileNotFoundError):
        importlib.import_module("own_pack")


def test_modules_are_unpacked_once_where_nobody_else_may_look(host: Path) -> None:
    sent = shipment("own_pack", **{"own_pack/__init__.py": "", "own_pack/a/b.txt": "b"})
    (place,) = {place for _, place in arrive(sent).places}
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
    assert (Path(place) / "own_pack/a/b.txt").read_text() == "b"
    (Path(place) / "own_pack/a/b.txt").write_text("as it was")
    assert arrive(sent).places == (("own_pack", place),)
    assert (Path(place) / "own_pack/a/b.txt").read_text() == "as it was"
    other = arrive(sent._replace(digest="d2")).places
    assert other != (("own_pack", place),)
    assert len(list(host.iterdir())) == 2


def test_a_folder_that_others_could_have_made_is_refused(host: Path) -> None:
    folders = {how: host / f"sparkdl-modules-{how}" for how in ("open", "link", "file")}
    folders["open"].mkdir()
    (folders["open"] / "own_one.py").write_text("import os; os.abort()")
    folders["open"].chmod(0o777)
    (host / "else").mkdir(mode=0o700)
    folders["link"].symlink_to(host / "else")
    folders["file"].write_text("")
    for how in folders:
        with pytest.raises(SetupError, match="another user or is open to others"):
            arrive(shipment(ONE, digest=how, **{"own_one.py": ""}))
    assert set(host.iterdir()) == {*folders.values(), host / "else"}


def test_an_archive_that_leads_elsewhere_is_refused(host: Path) -> None:
    for name in ("../own_one.py", "/tmp/own_one.py", "own_one/../../b.py", "own_two.py"):
        with pytest.raises(SetupError, match="the modules received contain a file"):
            arrive(shipment(ONE, **{name: ""}))
    assert list(host.iterdir()) == []


def test_a_module_that_did_not_come_is_named_with_its_reason() -> None:
    error = ModuleNotFoundError("No module named 'own_fast'", name="own_fast.ops")
    general = advice(error)
    assert "addPyFile" in general
    left = Arrived((), (), (("own_fast", "has a compiled part (own_fast/x.so)"),))
    with importable(left):
        told = advice(error)
        assert told.startswith("The module own_fast has a compiled part (own_fast/x.so). ")
        assert "spark.archives" in told
        assert advice(ModuleNotFoundError("x", name="own_other")) == general
    assert advice(error) == general


def test_without_a_shipment_nothing_changes() -> None:
    before = state()
    with importable(arrive(None)):
        assert state()[::2] == before[::2]
    assert state() == before


def test_in_a_process_that_looks_in_the_same_folder_the_path_stays(project: Path) -> None:
    write(project, {"own_one.py": "X = 1"})
    sent = shipment(ONE, base=str(project), **{"own_one.py": "X = 1"})
    before = list(sys.path)
    with on_path(project / "sub"), importable(arrive(sent)):
        assert sys.path[1:] == before


def test_what_has_come_into_a_folder_since_python_looked_there_is_found(project: Path) -> None:
    with on_path(project):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("own_later")
        looked = project.stat()
        write(project, {"own_later.py": "X = 1"})
        # As on a file system whose times are coarse.
        os.utime(project, ns=(looked.st_atime_ns, looked.st_mtime_ns))
        sent = shipment(ONE, **{"own_one.py": "from own_later import X"})
        with importable(arrive(sent)):
            assert importlib.import_module("own_one").X == 1


def test_the_lists_of_zip_files_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("own_zipped/__init__.py", "")
    again: list[str] = []
    monkeypatch.setattr(
        zipimport.zipimporter, "invalidate_caches", lambda self: again.append(self.archive)
    )
    with on_path(archive):
        importlib.import_module("own_zipped")
        again.clear()
        with importable(arrive(shipment(ONE, **{"own_one.py": "import own_zipped"}))):
            importlib.import_module("own_one")
    assert not again
