"""What is sent, and that it is importable within the block and not felt before or after."""

from __future__ import annotations

import importlib
import io
import logging
import os
import stat
import sys
import types
import zipfile
import zipimport
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from projects import on_path, write

from sparkdl.errors import ConfigError, SetupError
from sparkdl.spark import shipping
from sparkdl.spark.arrival import Arrived, Shipment, arrive, importable
from sparkdl.spark.shipping import Bundle, collect
from sparkdl.user_code.needed_modules import advice


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Spark keeps its files on this host; nothing was sent yet."""
    folder = tmp_path / "host"
    folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    monkeypatch.setattr(shipping, "_imported", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return folder


def bundle_of(*names: str, first: Sequence[str] = (), sent: Sequence[str] = ()) -> Bundle:
    return collect(names, first, sent)


def test_what_is_imported_comes_along_wherever_the_import_stands(project: Path) -> None:
    write(
        project,
        {
            "own_a.py": "import json, own_b as b\nfrom own_pack.net import Net",
            "own_b.py": "def f():\n    import own_c",
            "own_c.py": "class C:\n    if f:\n        from own_folder.deep import d",
            "own_folder/deep/d.py": "from . import e\nfrom .e import *",
            "own_folder/deep/e.py": "import own_a, torch.nn, own_nowhere",
            "own_pack/__init__.py": "",
            "own_pack/net.py": "from ..own_b import beyond",
            "own_pack/sibling.py": "from importlib import import_module",
            "own_pack/broken.py": "print 'Python 2'",
            "own_pack/sub/words.txt": "one two",
            "own_pack/.git/config": "",
            "own_pack/__pycache__/x.cpython-311.pyc": "",
            "own_unused.py": "",
        },
    )
    bundle = bundle_of("own_a.Net")
    expected = {
        "own_a.py", "own_b.py", "own_c.py", "own_folder/deep/d.py", "own_folder/deep/e.py",
        "own_pack/__init__.py", "own_pack/net.py", "own_pack/sibling.py", "own_pack/broken.py",
        "own_pack/sub/words.txt",
    }  # fmt: skip
    assert set(bundle.files) == expected
    assert bundle.left_out == {}
    with zipfile.ZipFile(io.BytesIO(bundle.archive())) as archive:
        assert set(archive.namelist()) == expected
        assert archive.read("own_pack/sub/words.txt") == b"one two"
    assert bundle.archive() == bundle_of("own_a").archive()
    assert "own_a" not in sys.modules


def test_nothing_of_the_users_own_is_nothing_to_send() -> None:
    names = (
        "json", "torch.nn.modules.linear", "pyspark.sql", "sparkdl.replica.losses", "tqdm.std",
        "builtins", "__main__", "a_module_that_nobody_has", "_struct", "functools",
    )  # fmt: skip
    bundle = bundle_of(*names)
    assert (bundle.files, bundle.left_out) == ({}, {})


def test_a_module_has_the_text_that_was_imported_until_it_is_imported_anew(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, {"own_text.py": "X = 1"})
    module = importlib.import_module("own_text")
    first = bundle_of("own_text")
    write(project, {"own_text.py": "X = 2"}, when=1)
    same = bundle_of("own_text")
    assert (same.digest, same.files) == (first.digest, {"own_text.py": b"X = 1"})
    assert "importlib.reload(own_text) loads the new one" in caplog.text
    importlib.reload(module)
    assert bundle_of("own_text").files == {"own_text.py": b"X = 2"}
    caplog.clear()
    write(project, {"own_text.py": "X = 2"}, when=2)
    bundle_of("own_text")  # the same text was written again
    assert caplog.text == ""


def test_a_folder_may_be_written_in_more_than_one_way(project: Path) -> None:
    write(project, {"lib/own_text.py": "X = 1", "other/own_text.py": "X = 'other'"})
    with on_path(project / "other" / ".." / "lib"):
        importlib.import_module("own_text")
        bundle_of("own_text")
        write(project, {"lib/own_text.py": "X = 2"}, when=1)
        script = bundle_of("own_text", first=[str(project / "other")])
        assert script.files == {"own_text.py": b"X = 'other'"}
        assert bundle_of("own_text").files == {"own_text.py": b"X = 1"}


def test_a_package_may_give_its_folder_as_a_path(project: Path) -> None:
    write(project, {"own_pack/__init__.py": ""})
    package = importlib.import_module("own_pack")
    assert package.__spec__ is not None
    # As transformers does once its processors are imported.
    package.__spec__.submodule_search_locations = [project / "own_pack"]  # type: ignore[list-item]
    assert bundle_of("own_pack").files == {"own_pack/__init__.py": b""}


def test_of_a_module_that_is_not_imported_the_newest_text_is_sent(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, {"own_text.py": "import own_first"})
    write(project, {"own_first.py": "", "own_second.py": ""})
    assert set(bundle_of("own_text").files) == {"own_text.py", "own_first.py"}
    write(project, {"own_text.py": "import own_second"}, when=1)
    assert set(bundle_of("own_text").files) == {"own_text.py", "own_second.py"}
    assert caplog.text == ""


def test_a_module_that_was_edited_between_import_and_first_use_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = "class Net:\n    def forward(self):\n        return 1\n"
    write(project, {"own_net.py": before})
    module = importlib.import_module("own_net")
    write(project, {"own_net.py": before.replace("1", "2")}, when=1)
    with pytest.raises(ConfigError, match=r"runs the old text.*importlib\.reload\(own_net"):
        bundle_of("own_net")
    importlib.reload(module)
    assert b"return 2" in bundle_of("own_net").files["own_net.py"]
    # Where Python writes no bytecode, it may be older than what was imported.
    write(project, {"own_net.py": before.replace("1", "3")}, when=2)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.reload(module)
    assert b"return 3" in bundle_of("own_net").files["own_net.py"]


def test_a_package_with_a_compiled_part_stays_and_the_rest_goes(project: Path) -> None:
    write(
        project,
        {
            "own_user.py": "import own_fast.ops, own_fast, own_slow",
            "own_slow.py": "",
            "own_fast/__init__.py": "",
            "own_fast/_ops.abi3.so": "",
        },
    )
    bundle = bundle_of("own_user", "own_fast.ops.Net")
    assert set(bundle.files) == {"own_user.py", "own_slow.py"}
    assert bundle.left_out == {"own_fast": "has a compiled part (own_fast/_ops.abi3.so)"}


def test_what_is_too_much_stays(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST_FILES", 6)
    monkeypatch.setattr(shipping, "MOST_BYTES", 100)
    monkeypatch.setattr(shipping, "LARGEST_DATA_FILE", 60)
    many = {f"own_home/{number}.txt": "" for number in range(6)}
    write(project, {"own_home/__init__.py": "", **many})
    write(project, {"own_long/__init__.py": "#" * 101})
    write(
        project,
        {
            "own_data/__init__.py": "#" * 20,
            "own_data/a.bin": "x" * 50,
            "own_data/b.bin": "x" * 40,
            "own_data/c.bin": "x" * 61,
            "own_data/\x7f.txt": "odd",
        },
    )
    bundle = bundle_of("own_home", "own_long", "own_data")
    assert set(bundle.files) == {"own_data/__init__.py", "own_data/b.bin"}
    assert set(bundle.too_large) == {"own_data/a.bin", "own_data/c.bin"}
    assert list(bundle.left_out) == ["own_home", "own_long"]
    assert "more than 6 files" in bundle.left_out["own_home"]
    assert "of Python" in bundle.left_out["own_long"]


def test_a_package_that_is_too_large_is_not_searched_for_imports(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bytes] = []

    def imports(text: bytes) -> frozenset[str]:
        compiled.append(text)
        return frozenset()

    monkeypatch.setattr(shipping, "_imports", imports)
    monkeypatch.setattr(shipping, "MOST_BYTES", 100)
    write(project, {"own_long/__init__.py": "#" * 101, "own_short.py": "import own_long"})
    bundle_of("own_long", "own_short")
    assert compiled == [b"import own_long"]


def test_the_log_says_nothing_where_all_is_well(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(project, {"own_text.py": "X = 1"})
    importlib.import_module("own_text")
    bundle_of("own_text")
    assert caplog.text == ""


def test_of_a_folder_that_installed_packages_share_ones_own_part_is_sent(
    project: Path, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages"
    write(installed, {"own_shared/theirs.py": ""})
    write(project, {"own_shared/ours.py": "", "own_apart/ours.py": ""})
    with on_path(installed):
        bundle = bundle_of("own_shared.ours", "own_apart")
    assert sorted(bundle.files) == ["own_apart/ours.py", "own_shared/ours.py"]


def test_a_module_in_a_zip_file_stays_unless_spark_has_sent_it(tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("own_zipped/__init__.py", "")
    with on_path(archive):
        for sent in (["code.zip"], [str(tmp_path)]):
            assert bundle_of("own_zipped", sent=sent) == Bundle()
        left = bundle_of("own_zipped", sent=["other.zip", f"{tmp_path}/pro"]).left_out
        assert "code.zip" in left["own_zipped"]


def test_a_checkout_that_was_installed_in_place_is_the_users_own(project: Path) -> None:
    write(project, {"src/own_edited/__init__.py": "", "src/own_edited.egg-info/top_level.txt": ""})
    with on_path(project / "src"):
        assert bundle_of("own_edited").names == ("own_edited",)


def test_the_folder_of_a_script_comes_before_what_this_process_has_imported(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"own_model.py": "", "own_data/__init__.py": "HERE = 1"})
    write(tmp_path / "script", {"own_model.py": "BESIDE = 1", "own_data/table.csv": ""})
    importlib.import_module("own_model")
    beside = [str(tmp_path / "script")]
    assert bundle_of("own_model").files == {"own_model.py": b""}
    assert bundle_of("own_model", first=beside).files == {"own_model.py": b"BESIDE = 1"}
    assert set(bundle_of("own_data", first=beside).files) == {"own_data/__init__.py"}


def test_what_was_not_loaded_from_a_file_of_its_name_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("own_odd.cpython-311-x86_64-linux-gnu.so", "another.py"):
        write(project, {file: ""})
        module, origin = types.ModuleType("own_odd"), str(project / file)
        module.__spec__ = ModuleSpec("own_odd", None, origin=origin)
        monkeypatch.setitem(sys.modules, "own_odd", module)
        assert f"loaded from {origin}, which is neither" in bundle_of("own_odd").left_out["own_odd"]
    monkeypatch.setitem(sys.modules, "own_odd", types.ModuleType("own_odd"))
    assert bundle_of("own_odd.Net") == Bundle()


def test_a_name_of_the_standard_library_cannot_travel(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"colorsys.py": ""})
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.import_module("colorsys")
    assert "name of a standard library module" in bundle_of("colorsys").left_out["colorsys"]


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
