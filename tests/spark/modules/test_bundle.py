"""What is sent: all that is needed, as the driver has imported it, and no more than fits."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from projects import on_path, write

from sparkdl.errors import ConfigError
from sparkdl.spark.modules import texts
from sparkdl.spark.modules.bundle import Bundle, collect
from sparkdl.spark.modules.shipment import is_plain
from sparkdl.spark.modules.texts import Texts
from sparkdl.spark.modules.units import Finder


def bundle_of(*names: str, known: Texts | None = None, first: Iterable[str] = ()) -> Bundle:
    return collect(names, Finder(list(first)), known or Texts())


def test_what_is_imported_comes_along_wherever_the_import_stands(project: Path) -> None:
    write(
        project,
        {
            "own_a.py": "import json, own_b as b\nfrom own_pack.net import Net",
            "own_b.py": "def f():\n    import own_c",
            "own_c.py": "class C:\n    if f:\n        from own_folder import d",
            "own_folder/d.py": "from . import e\nfrom .e import *",
            "own_folder/e.py": "import own_a, torch.nn, own_nowhere",
            "own_folder/unused.py": "",
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
        "own_a.py", "own_b.py", "own_c.py", "own_folder/d.py", "own_folder/e.py",
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
    bundle = bundle_of("torch.nn", "functools", "__main__", "a_module_that_nobody_has")
    assert (bundle.files, bundle.units, bundle.left_out) == ({}, {}, {})


def test_a_package_in_a_zip_file_comes_whole_with_what_it_imports(tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("own_zipped/__init__.py", "import own_beside")
        file.writestr("own_zipped/data/x.json", "{}")
        file.writestr("own_beside.py", "X = 1")
        file.writestr("own_unused.py", "")
    with on_path(archive):
        importlib.import_module("own_zipped")
        files = bundle_of("own_zipped").files
    assert files == {
        "own_zipped/__init__.py": b"import own_beside",
        "own_zipped/data/x.json": b"{}",
        "own_beside.py": b"X = 1",
    }


def test_a_module_has_the_text_that_was_imported_until_it_is_imported_anew(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, {"own_text.py": "X = 1"})
    module, known = importlib.import_module("own_text"), Texts()
    first = bundle_of("own_text", known=known)
    write(project, {"own_text.py": "X = 2"}, when=1)
    same = bundle_of("own_text", known=known)
    assert (same.digest, same.files) == (first.digest, {"own_text.py": b"X = 1"})
    assert "importlib.reload(own_text) loads the new one" in caplog.text
    with pytest.raises(ConfigError, match=r"own_text\.py has changed since own_text was imported"):
        collect(["own_text"], Finder(), known, refuse_edited=True)
    importlib.reload(module)
    assert bundle_of("own_text", known=known).files == {"own_text.py": b"X = 2"}
    write(project, {"own_text.py": "X = 2  # only a comment"}, when=2)
    same = collect(["own_text"], Finder(), known, refuse_edited=True)
    assert same.files == {"own_text.py": b"X = 2"}


def test_a_folder_may_be_written_in_more_than_one_way(project: Path) -> None:
    write(project, {"lib/own_text.py": "X = 1", "other/own_text.py": "X = 'other'"})
    known = Texts()
    with on_path(project / "other" / ".." / "lib"):
        importlib.import_module("own_text")
        bundle_of("own_text", known=known)
        write(project, {"lib/own_text.py": "X = 2"}, when=1)
        script = bundle_of("own_text", known=known, first=[str(project / "other")])
        assert script.files == {"own_text.py": b"X = 'other'"}
        assert bundle_of("own_text", known=known).files == {"own_text.py": b"X = 1"}


def test_of_a_module_that_is_not_imported_the_newest_text_is_sent(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, {"own_text.py": "import own_first"})
    write(project, {"own_first.py": "", "own_second.py": ""})
    known = Texts()
    assert set(bundle_of("own_text", known=known).files) == {"own_text.py", "own_first.py"}
    write(project, {"own_text.py": "import own_second"}, when=1)
    assert set(bundle_of("own_text", known=known).files) == {"own_text.py", "own_second.py"}
    assert caplog.text == ""


def test_a_module_that_was_edited_since_its_import_is_refused(project: Path) -> None:
    before = "class Net:\n    def forward(self):\n        return 1\n"
    write(project, {"own_net.py": before})
    importlib.import_module("own_net")
    write(project, {"own_net.py": "# only a comment\n\n" + before}, when=1)
    bundle_of("own_net")
    write(project, {"own_net.py": before.replace("1", "2")}, when=2)
    with pytest.raises(ConfigError, match=r"runs the old Net\.forward.*importlib\.reload\(own_net"):
        bundle_of("own_net")


def test_functions_that_others_have_wrapped_or_put_there_are_no_edit(project: Path) -> None:
    write(
        project,
        {
            "own_net.py": "import functools, dataclasses\nfrom own_tools import logged, helper\n"
            "@dataclasses.dataclass\nclass D:\n    x: int = 1\n    f = lambda self: 3\n"
            "    @staticmethod\n    def s(): ...\n    @property\n    def p(self): ...\n"
            "@logged\ndef f(): ...\n@functools.cache\ndef g(): ...",
            "own_tools.py": "def logged(f):\n    def inner(): return f()\n    return inner\n"
            "def helper(): ...",
        },
    )
    module = importlib.import_module("own_net")
    module.D.added = lambda self: 4  # type: ignore[attr-defined]
    assert set(bundle_of("own_net").files) == {"own_net.py", "own_tools.py"}


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
    monkeypatch.setattr(texts, "MOST_FILES", 6)
    monkeypatch.setattr(texts, "MOST_BYTES", 100)
    monkeypatch.setattr(texts, "LARGEST_DATA_FILE", 60)
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
            "own_data/d?.txt": "odd",
        },
    )
    bundle = bundle_of("own_home", "own_long", "own_data")
    assert set(bundle.files) == {"own_data/__init__.py", "own_data/b.bin"}
    assert set(bundle.too_large) == {"own_data/a.bin", "own_data/c.bin", "'own_data/d?.txt'"}
    assert list(bundle.left_out) == ["own_home", "own_long"]
    assert "more than 6 files" in bundle.left_out["own_home"]
    assert "of Python" in bundle.left_out["own_long"]


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("a.py", True),
        ("a/b c/d-1.txt", True),
        ("", False),
        ("/etc/passwd", False),
        ("../a.py", False),
        ("a/../../b", False),
        ("a//b", False),
        ("./a", False),
        ("a\\b", False),
        ("C:a", False),
        ("a\0b", False),
        ("a\nb", False),
        ("\ud800", False),
    ],
)
def test_a_plain_path_leads_below_where_it_begins(path: str, plain: bool) -> None:
    assert is_plain(path) is plain


def test_the_log_says_nothing_where_all_is_well(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(project, {"own_text.py": "X = 1"})
    importlib.import_module("own_text")
    bundle_of("own_text")
    assert caplog.text == ""
