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
from sparkdl.spark.arrival import Arrived, Shipment, arrive, importable
from sparkdl.user_code.needed_modules import advice


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Spark keeps its files on this host."""
    folder = tmp_path / "host"
    folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    return folder


def shipment(*names: str, digest: str = "d1", **files: str) -> Shipment:
    """One as the driver makes it; the paths' dots are written as two underscores."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    broadcast: Any = SimpleNamespace(value=packed.getvalue())
    return Shipment(digest, names, broadcast, ())


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


def test_what_is_installed_below_the_same_name_is_there_too(tmp_path: Path) -> None:
    write(tmp_path / "site-packages", {"own_shared/theirs.py": "WHOSE = 'installed'"})
    arrived = arrive(shipment("own_shared", **{"own_shared/ours.py": "WHOSE = 'sent'"}))
    with on_path(tmp_path / "site-packages"):
        before = state()
        with importable(arrived):
            assert importlib.import_module("own_shared.ours").WHOSE == "sent"
            assert importlib.import_module("own_shared.theirs").WHOSE == "installed"
        assert state() == before


def test_a_folder_without_init_has_what_was_sent_and_nothing_of_what_is_here(project: Path) -> None:
    write(project, {"own_folder/here.py": "WHOSE = 'here'", "own_folder/both.py": "WHOSE = 'here'"})
    arrived = arrive(
        shipment(
            "own_folder",
            "own_new",
            **{
                "own_folder/both.py": "WHOSE = 'sent'",
                "own_new/deep/net.py": "from own_folder import both",
            },
        )
    )
    both = importlib.import_module("own_folder.both")
    before = state()
    for _ in range(2):
        with importable(arrived), on_path(project):
            assert importlib.import_module("own_new.deep.net").both.WHOSE == "sent"
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module("own_folder.here")
        assert state() == before
        assert importlib.import_module("own_folder").both is both


def test_modules_are_unpacked_once_where_nobody_else_may_look(host: Path) -> None:
    sent = shipment("own_pack", **{"own_pack/__init__.py": "", "own_pack/a/b.txt": "b"})
    place = arrive(sent).folder
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
    assert (Path(place) / "own_pack/a/b.txt").read_text() == "b"
    (Path(place) / "own_pack/a/b.txt").write_text("as it was")
    assert arrive(sent).folder == place
    assert (Path(place) / "own_pack/a/b.txt").read_text() == "as it was"
    assert arrive(sent._replace(digest="d2")).folder != place
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


def test_an_archive_that_leads_elsewhere_stays_in_its_folder(host: Path) -> None:
    for number, name in enumerate(("../own_one.py", "/tmp/own_one.py", "own_one/../../b.py")):
        arrive(shipment(ONE, digest=f"d{number}", **{name: ""}))
    assert {path.name for path in host.iterdir()} == {f"sparkdl-modules-d{n}" for n in range(3)}


def test_a_module_that_did_not_come_is_named_with_its_reason() -> None:
    error = ModuleNotFoundError("No module named 'own_fast'", name="own_fast.ops")
    general = advice(error)
    assert "addPyFile" in general
    left = Arrived((), "", (("own_fast", "has a compiled part (own_fast/x.so)"),))
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
