"""What counts as the user's own, and what travels as one."""

from __future__ import annotations

import importlib
import sys
import types
import zipfile
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path

import pytest
from projects import on_path, write

from sparkdl.spark.modules.units import CannotTravelError, Finder, Unit


def unit_of(name: str, **settings: list[str]) -> Unit | None:
    return Finder(**settings).unit_of(name)


def test_what_is_installed_or_standard_is_nobodys_own() -> None:
    names = (
        "json", "torch.nn.modules.linear", "pyspark.sql", "sparkdl.replica.losses", "tqdm.std",
        "builtins", "__main__", "a_module_that_nobody_has", "_struct",
    )  # fmt: skip
    assert [name for name in names if unit_of(name) is not None] == []


def test_a_module_is_one_and_a_package_is_one_with_all_that_is_in_it(project: Path) -> None:
    write(project, {"own_one.py": "", "own_pack/__init__.py": "", "own_pack/deep/net.py": ""})
    one = unit_of("own_one.Net")
    assert one == Unit("own_one", str(project / "own_one.py"), is_package=False)
    assert one.base == project
    for name in ("own_pack", "own_pack.deep.net", "own_pack.deep.net.Net"):
        pack = unit_of(name)
        assert pack == Unit("own_pack", str(project / "own_pack/__init__.py"), is_package=True)
        assert (pack.base, pack.relative) == (project, "own_pack")


def test_of_folders_that_are_no_packages_only_the_module_goes(project: Path) -> None:
    write(project, {"own_folder/team/net.py": "", "own_folder/lib/__init__.py": ""})
    importlib.import_module("own_folder.team.net")
    unit = unit_of("own_folder.team.net")
    assert unit is not None
    assert (unit.name, unit.relative) == ("own_folder.team.net", "own_folder/team/net.py")
    assert unit.base == project
    inner = unit_of("own_folder.lib.more")
    assert inner is not None
    assert (inner.name, inner.relative) == ("own_folder.lib", "own_folder/lib")
    assert unit_of("own_folder") is None
    assert unit_of("own_folder.nothing") is None


def test_a_module_in_a_zip_file_stays_unless_spark_has_sent_it(tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("own_zipped/__init__.py", "")
    with on_path(archive):
        for sent in (["code.zip"], [str(tmp_path)]):
            assert unit_of("own_zipped", sent=sent) is None
        with pytest.raises(CannotTravelError, match=r"is in a zip file \(.*code\.zip\)"):
            unit_of("own_zipped", sent=["other.zip", f"{tmp_path}/pro"])


def test_what_pip_has_installed_into_a_folder_is_installed(project: Path) -> None:
    write(
        project,
        {
            "own_bought.py": "",
            "own_made.py": "",
            "bought-1.dist-info/RECORD": "own_bought.py,,\nbought-1.dist-info/RECORD,,\n",
            "unreadable-1.dist-info/RECORD/is a folder": "",
        },
    )
    assert unit_of("own_bought") is None
    assert unit_of("own_made") is not None


def test_a_checkout_that_was_installed_in_place_is_the_users_own(project: Path) -> None:
    write(project, {"src/own_edited/__init__.py": "", "src/own_edited.egg-info/top_level.txt": ""})
    with on_path(project / "src"):
        assert unit_of("own_edited") is not None


def test_the_folder_of_a_script_comes_before_what_this_process_has_imported(
    project: Path, tmp_path: Path
) -> None:
    write(project, {"own_model.py": ""})
    write(tmp_path / "script", {"own_model.py": "", "own_folder/x.py": ""})
    importlib.import_module("own_model")
    for first, expected in (([], project), ([str(tmp_path / "script")], tmp_path / "script")):
        unit = unit_of("own_model", first=first)
        assert unit is not None
        assert unit.base == expected


def test_what_cannot_travel_says_why(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, reason in (
        (None, "was not loaded from a file"),
        ("own_odd.cpython-311-x86_64-linux-gnu.so", "is a compiled extension"),
        ("another.py", "a file with a different name"),
    ):
        module = types.ModuleType("own_odd")
        if file is not None:
            write(project, {file: ""})
            origin = str(project / file)
            loader = ExtensionFileLoader("own_odd", origin)
            module.__spec__ = ModuleSpec("own_odd", loader, origin=origin)
        monkeypatch.setitem(sys.modules, "own_odd", module)
        with pytest.raises(CannotTravelError, match=reason):
            unit_of("own_odd.Net")


def test_a_name_of_the_standard_library_cannot_travel(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"colorsys.py": ""})
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    importlib.import_module("colorsys")
    with pytest.raises(CannotTravelError, match="name of a standard library module"):
        unit_of("colorsys")
