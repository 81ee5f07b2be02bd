"""What is sent: all that is needed, as the driver has imported it, and no more than fits."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from projects import on_path, write

from sparkdl.errors import ConfigError
from sparkdl.spark import shipping
from sparkdl.spark.shipping import Bundle, collect


@pytest.fixture(autouse=True)
def nothing_sent_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "_imported", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


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
